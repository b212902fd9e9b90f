"""An S3 server on loopback that checks signatures, with one bucket and one user who may do everything.

Writes `key=value` lines to the file given (address, bucket, access_key, secret_key) and serves until its
standard input ends.
"""
import os
import sys

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
    with open(out + ".partial", "w") as f:
        f.write(f"address={address}\nbucket=states\naccess_key={key['AccessKeyId']}\n"
                f"secret_key={key['SecretAccessKey']}\n")
    os.rename(out + ".partial", out)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
