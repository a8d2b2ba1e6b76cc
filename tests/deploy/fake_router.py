"""Stands for the router: ready at once, and answers everything with what it was started with."""

import argparse
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(" ".join(sys.argv[1:]).encode())

    do_POST = do_GET


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
options, _ = parser.parse_known_args()
HTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
