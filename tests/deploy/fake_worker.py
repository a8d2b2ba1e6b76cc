"""Stands for a worker: accepts connections on its ports. What follows --fake makes it misbehave."""

import argparse
import signal
import socket
import sys
import threading

parser = argparse.ArgumentParser()
parser.add_argument("--grpc-port", type=int)
parser.add_argument("--metrics-port", type=int)
parser.add_argument("--fake", default="")
options, _ = parser.parse_known_args()

if options.fake == "die":
    sys.exit("the last words")
if options.fake == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("fake worker", sys.argv[1:], flush=True)
if options.fake == "never ready":
    threading.Event().wait()
listeners = [
    socket.create_server(("127.0.0.1", port)) for port in (options.grpc_port, options.metrics_port)
]
threading.Event().wait()
