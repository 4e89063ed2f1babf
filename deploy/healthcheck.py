"""Exit code 0 when http://127.0.0.1:PORT/PATH answers 200 and, if a word is given, its answer has that word in it.

Use: healthcheck.py PORT PATH [WORD]. The images have no curl.
"""

import http.client
import sys

port, path, word = int(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
try:
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read().decode(errors="replace")
except OSError as error:
    sys.exit(f"port {port}: {error}")
if response.status != 200 or word not in body:
    sys.exit(f"{path}: {response.status} {body[:200]}")
