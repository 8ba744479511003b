"""JSON to the server of --rollouts and back, and a sentence for whatever goes wrong on the way.

http.client follows no redirect and asks the environment for no proxy, so this talks to the address
that was given and to nothing else. Requests run side by side, since a server batches what arrives
together. They have one deadline for all. A reply may have only so many bytes, so that no server can
fill the memory.
"""
import json
import queue
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead

from engine.errors import UserError, parse_object

FLAG = "--rollouts"
AT_ONCE = 128  # requests under way; the others wait for their turn
ADDRESS = re.compile(r"http://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?/?")


def read_address(text: str) -> str:
    """Check an address, http://HOST:PORT. A password in it is refused, and not repeated."""
    if "@" in text:
        raise UserError(f"{FLAG}: an address cannot hold a user or a password, because it is "
                        "kept in config.json")
    if not ADDRESS.fullmatch(text):
        raise UserError(f"{FLAG} {text:.80} should be http://HOST:PORT, in small letters "
                        "and with nothing behind it")
    return text.rstrip("/")


@dataclass(frozen=True)
class Client:
    """A client of the server at an address."""
    address: str    # http://HOST:PORT
    seconds: float  # the time for all requests that are made together
    most: int       # bytes of a reply

    def ask(self, method: str, path: str, content: dict | None = None) -> dict:
        return self.all([(method, path, content)])[0]

    def all(self, requests: list[tuple[str, str, dict | None]]) -> list[dict]:
        """Make requests (method, path, content) side by side, and return their answers in the same
        order. The first that fails ends the waiting for all."""
        waiting: queue.SimpleQueue = queue.SimpleQueue()
        done: queue.SimpleQueue = queue.SimpleQueue()

        def work() -> None:
            with suppress(queue.Empty):  # no request waits any more
                while True:
                    number, request = waiting.get_nowait()
                    try:
                        done.put((number, self.exchange(*request)))
                    except Exception as error:  # whatever it is, the caller waits for it
                        done.put((number, error))

        deadline = time.monotonic() + self.seconds
        for numbered in enumerate(requests):
            waiting.put(numbered)
        for _ in range(min(AT_ONCE, len(requests))):
            # a daemon does not delay the exit of the program
            threading.Thread(target=work, daemon=True).start()
        answers: dict[int, dict] = {}
        while len(answers) < len(requests):
            try:
                number, answer = done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:  # also if a server keeps sending a byte now and then
                raise self.too_late() from None
            if isinstance(answer, Exception):
                raise answer
            answers[number] = answer
        return [answers[number] for number in range(len(requests))]

    def exchange(self, method: str, path: str, content: dict | None) -> dict:
        """Send one request, and return the JSON object of the reply."""
        question = None if content is None else json.dumps(content)
        connection = HTTPConnection(self.address.removeprefix("http://"), timeout=self.seconds)
        try:
            connection.request(method, path, question, {"Content-Type": "application/json"})
            with connection.getresponse() as response:  # closed, or a long reply would go on
                body = self.read_body(response)
        except TimeoutError:
            raise self.too_late() from None
        except (OSError, OverflowError, HTTPException, ValueError) as error:  # a port, a chunk
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise self.error(f"no answer to {path} ({one_line(reason)})") from None
        finally:
            connection.close()
        if len(body) > self.most:
            raise self.error(f"its answer to {path} has more than {self.most:,} bytes")
        text = body.decode(errors="replace")
        if response.status != 200:
            said = f": {one_line(text)}" if text.strip() else ""
            raise self.error(f"it answers {path} with {response.status}{said}")
        return parse_object(text, str(self.error(f"its answer to {path}")))

    def read_body(self, response: HTTPResponse) -> bytes:
        """The body of a reply, or the beginning of one that is too long."""
        body = response.read(self.most + 1)
        if response.length and len(body) <= self.most:
            raise IncompleteRead(body, response.length)
        return body

    def too_late(self) -> UserError:
        return self.error(f"no whole answer within {self.seconds:g} s")

    def error(self, what: str) -> UserError:
        return UserError(f"{FLAG} {self.address}: {what}")


def one_line(text: object) -> str:
    """The words of another program, short enough to be shown."""
    return " ".join(str(text).split())[:200]
