"""No server of models: a handler that answers at once, to see what this machine's HTTP alone can do.

python starlette_server.py PORT
"""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ANSWER = b'{"model_name":"tiny","outputs":[{"name":"output","datatype":"FP32","shape":[1,8],"data":[0,1,2,3,4,5,6,7]}]}'


async def answer(request: Request) -> Response:
    await request.body()
    return Response(ANSWER, media_type="application/json")


if __name__ == "__main__":
    app = Starlette(routes=[Route("/v2/models/tiny/infer", answer, methods=["POST"])])
    uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", log_level="warning", access_log=False)
