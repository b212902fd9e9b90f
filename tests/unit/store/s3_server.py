"""An S3 server on loopback that checks signatures, with one bucket and one user who may do everything.

Writes `key=value` lines to the file given (address, bucket, access_key, secret_key) and serves until its
standard input ends. The server is moto; or, with a second argument, that program, until it is killed or its
parent is gone: versitygw, which was not made to be asked by tests
(go install github.com/versity/versitygw/cmd/versitygw@latest).
"""
import ctypes
import os
import signal
import socket
import sys
import time

KEYS = "tester", "testers-secret"   # of a program


def run(program, out):
    """Becomes the program; its data lies beside `out`."""
    bucket, attributes = out + ".data/states", out + ".attributes"
    os.makedirs(bucket)
    os.makedirs(attributes)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    me = os.getpid()
    if os.fork() == 0:
        for _ in range(600):
            if os.getppid() != me:   # the program did not start
                break
            with socket.socket() as s:
                if s.connect_ex(("127.0.0.1", port)) == 0:
                    write(out, f"http://127.0.0.1:{port}", *KEYS)
                    break
            time.sleep(0.1)
        os._exit(0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when the parent dies
    os.execv(program, [program, f"--port=127.0.0.1:{port}", f"--access={KEYS[0]}", f"--secret={KEYS[1]}",
                       "--quiet", "posix", f"--sidecar={attributes}", os.path.dirname(bucket)])


def write(out, address, access_key, secret_key):
    with open(out + ".partial", "w") as f:
        f.write(f"address={address}\nbucket=states\naccess_key={access_key}\nsecret_key={secret_key}\n")
    os.rename(out + ".partial", out)


if __name__ == "__main__" and len(sys.argv) > 2:
    run(sys.argv[2], sys.argv[1])

# Requests up to here are not checked: they make the user, its keys, its policy and the bucket.
os.environ["INITIAL_NO_AUTH_ACTION_COUNT"] = "4"
for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    os.environ[name] = "nobody"

import json  # noqa: E402
import logging  # noqa: E402

import boto3  # noqa: E402
from moto.server import ThreadedMotoServer  # noqa: E402

POLICY = {"Version": "2012-10-17",
          "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


def main(out):
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    iam = boto3.client("iam", endpoint_url=address, region_name="us-east-1")
    iam.create_user(UserName="tester")
    key = iam.create_access_key(UserName="tester")["AccessKey"]
    iam.put_user_policy(UserName="tester", PolicyName="all", PolicyDocument=json.dumps(POLICY))
    s3 = boto3.client("s3", endpoint_url=address, region_name="us-east-1",
                      config=boto3.session.Config(s3={"addressing_style": "path"}))
    s3.create_bucket(Bucket="states")
    write(out, address, key["AccessKeyId"], key["SecretAccessKey"])
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
