"""The sampler of this project as a server: --rollouts can be tried with two terminals and no GPU.

    python -m bridges.serve models/tiny
    python train.py --rollouts http://127.0.0.1:8000

It knows three requests, in vLLM's words: GET /v1/models, POST /v1/completions with token ids, POST
/collective_rpc for the weights. It answers programs on this machine, one request after another; a
page in a browser, which can send requests to this machine too, is refused.
"""
if not __package__:
    raise SystemExit("start it with: python -m bridges.serve")
import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from engine.sampler import generate
from harness.files import parse_object
from harness.flags import Flag, Parser, add_flags, shortened, some_text, with_defaults
from harness.load import set_threads
from harness.program import run_as_program
from harness.progress import say
from qwen2_model import Qwen2

FLAGS = {"port": Flag(8000, "0 takes a free one", least=0, most=65535)}
OUR_NAMES = ("127.0.0.1", "localhost")


class Sampler:
    """What answers: a model that can be exchanged for another between two requests."""

    def __init__(self, folder: Path):
        self.name = str(folder)
        self.model = Qwen2.from_pretrained(folder)
        set_threads(0, self.model)

    def models(self, request: dict) -> dict:
        return {"data": [{"id": self.name}]}

    def load(self, request: dict) -> dict:
        if request["method"] != "reload_weights":
            raise ValueError("the method should be reload_weights")
        self.model = Qwen2.from_pretrained(Path(request["kwargs"]["weights_path"]))
        return {"results": [None]}

    def complete(self, request: dict) -> dict:
        prompt = request["prompt"]
        sampled = generate(
            self.model, [prompt], answers=request["n"], seed=request["seed"],
            max_new_tokens=request["max_tokens"], temperature=request["temperature"],
            stop_ids=tuple(request["stop_token_ids"]))
        choices = [{"index": row, "prompt_token_ids": prompt,
                    "token_ids": sampled.tokens[row, :length].tolist(),
                    "logprobs": {"token_logprobs": sampled.log_prob[row, :length].tolist()}}
                   for row, length in enumerate(sampled.mask.sum(1).tolist())]
        return {"model": self.name, "choices": choices}


class Handler(BaseHTTPRequestHandler):
    sampler: Sampler  # of all requests
    timeout = 30.0    # seconds that a client may be silent

    def do_GET(self) -> None:
        self.answer({"/v1/models": self.sampler.models})

    def do_POST(self) -> None:
        self.answer({"/v1/completions": self.sampler.complete,
                     "/collective_rpc": self.sampler.load})

    def answer(self, functions: dict) -> None:
        try:
            request = self.read_request() if self.command == "POST" else {}
            self.refuse_pages()
            self.send(200, functions[self.path](request))
        except PermissionError as error:
            self.send(403, {"error": str(error)})
        except (LookupError, OSError, TypeError, ValueError, RuntimeError) as error:
            self.send(400, {"error": f"{type(error).__name__}: {error}"})

    def read_request(self) -> dict:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        return parse_object(body.decode(), "the body")

    def refuse_pages(self) -> None:
        """A browser sends what any page tells it to, also to this machine. It names the page's
        Origin, or the page's own Host where that name was made to lead here (DNS rebinding)."""
        host = self.headers.get("Host", "")
        if host.lower().partition(":")[0] not in OUR_NAMES:
            raise PermissionError(f"the Host should be {' or '.join(OUR_NAMES)}, got "
                                  f"{shortened(host) or 'none'}")
        if "Origin" in self.headers:
            raise PermissionError("requests of web pages (Origin) are not answered")
        if self.command == "POST" and self.headers.get_content_type() != "application/json":
            raise PermissionError("the Content-Type should be application/json")

    def send(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        with suppress(OSError):  # the client waits no longer
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing for each request."""


class Server(HTTPServer):
    request_queue_size = 128  # connections that wait for their turn; any more are reset


def serve(folder: Path, port: int, handler: type[Handler] = Handler) -> None:
    handler.sampler = Sampler(folder)
    server = Server(("127.0.0.1", port), handler)
    say(f"{folder} answers at http://127.0.0.1:{server.server_port} until Ctrl-C")
    server.serve_forever()


def main(argv: list[str]) -> None:
    parser = Parser("python -m bridges.serve MODEL [--port N]", __doc__)
    parser.add_argument("model", metavar="MODEL", type=some_text, help="a model folder")
    given = add_flags(parser, FLAGS).read(argv)
    serve(Path(given.pop("model")), with_defaults(given, FLAGS).port)


if __name__ == "__main__":
    run_as_program("serve", main)
