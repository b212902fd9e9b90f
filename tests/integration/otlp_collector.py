"""An OTLP collector with OpenTelemetry's own protocol files: one line of JSON for each span it is sent.

Writes its address to the file given, then spans to standard output, until its standard input ends.
"""
import json
import sys
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


def value_of(value):
    kind = value.WhichOneof("value")
    return [value_of(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def attributes(of):
    return {a.key: value_of(a.value) for a in of.attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request, context):
        for of in request.resource_spans:
            for scope in of.scope_spans:
                for span in scope.spans:
                    print(json.dumps({
                        "resource": attributes(of.resource), "scope": scope.scope.name, "name": span.name,
                        "trace": span.trace_id.hex(), "span": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(), "kind": span.kind, "flags": span.flags,
                        "start": span.start_time_unix_nano, "end": span.end_time_unix_nano,
                        "events": {e.name: e.time_unix_nano for e in span.events},
                        "status": span.status.code, "message": span.status.message,
                        "attributes": attributes(span)}), flush=True)
        return trace_service_pb2.ExportTraceServiceResponse()


def main(address_file):
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with open(address_file, "w") as f:
        f.write(f"127.0.0.1:{port}")
    sys.stdin.read()
    server.stop(1).wait()


if __name__ == "__main__":
    main(sys.argv[1])
