// grpc.reflection.v1alpha.ServerReflection: what a server speaks, for tools such as grpcurl.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "services/common/grpc_call.h"

namespace deltamesh {

// `services` are the server's others; its own name is added to them. Thread-safe.
std::unique_ptr<GrpcService> MakeReflectionService(std::vector<std::string>* services);

}  // namespace deltamesh
