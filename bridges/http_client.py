"""JSON to a server and back, and one sentence for all that can go wrong on the way.

http.client follows no redirect and asks the environment for no proxy, so this talks to the address
that was given and to nothing else. Requests run side by side, since a server batches what arrives
together. They have one deadline for all: a server that sends a byte a minute is given up as well.
Threads only send and receive. Answers are parsed by the caller, one at a time, between two looks at
the deadline: parsing holds the interpreter, and threads that did it would delay the look.
"""
import json
import queue
import re
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple

from engine.errors import UserError
from harness.files import parse_object
from harness.flags import shortened

AT_ONCE = 128  # requests under way; the others wait for their turn
LARGEST_ANSWER = 2 ** 20  # bytes, where nothing else is said
LOOK_EVERY = 5.0  # seconds without an answer after which the server is asked whether it is there
CONNECTIONS = {"http": HTTPConnection, "https": HTTPSConnection}
ADDRESS = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?/?")
LAST_PORT = 65535


def read_address(text: str, flag: str) -> str:
    """http://HOST:PORT, as the flag has it. A password in it is refused, and not repeated."""
    if "@" in text:
        raise UserError(f"{flag}: an address cannot hold a user or a password, it is kept in "
                        "config.json")
    match = ADDRESS.fullmatch(text)
    if not match or int((match[2] or ":0")[1:]) > LAST_PORT:
        raise UserError(f"{flag} {shortened(text)} should be http://HOST:PORT or "
                        "https://HOST:PORT, in small letters and with nothing behind it")
    return text.rstrip("/")


class Refused(UserError):
    """The server answered with a status that is not 200."""

    def __init__(self, sentence: str, status: int):
        super().__init__(sentence)
        self.status = status


class Reply(NamedTuple):
    """What came back, not looked at yet."""
    status: int
    body: bytes
    is_whole: bool  # all bytes that were promised have come


@dataclass(frozen=True)
class Client:
    """What talks to the server at an address; `flag` is what errors begin with."""
    flag: str
    address: str    # http://HOST:PORT
    seconds: float  # for all that is asked at once

    def get(self, path: str) -> dict:
        return self.all([("GET", path, None)])[0]

    def post(self, path: str, content: dict) -> dict:
        return self.all([("POST", path, content)])[0]

    def all(self, requests: list[tuple], largest: int = LARGEST_ANSWER) -> list[dict]:
        """The answers to requests (method, path, content), in their order, each of `largest` bytes
        at most. The first request that fails ends the waiting for all."""
        waiting, done = queue.SimpleQueue(), queue.SimpleQueue()
        for number_and_request in enumerate(requests):
            waiting.put(number_and_request)

        def work() -> None:
            while True:
                try:
                    number, request = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((number, self.exchange(*request, largest)))
                except Exception as error:  # whatever it is, somebody waits for it
                    done.put((number, error))

        for _ in range(min(AT_ONCE, len(requests))):  # as daemons: none of them delays an exit
            threading.Thread(target=work, daemon=True).start()
        deadline = time.monotonic() + self.seconds
        answers = {}
        while len(answers) < len(requests):
            left = deadline - time.monotonic()
            try:
                number, reply = done.get(timeout=max(0.0, min(left, LOOK_EVERY)))
            except queue.Empty:
                if left < LOOK_EVERY:
                    raise self.too_late() from None
                # vLLM that is told to stop closes its port, and leaves open connections silent
                self.exchange("GET", "/v1/models", None, largest)
                continue
            if isinstance(reply, Exception):
                raise reply
            answers[number] = self.read(requests[number][1], reply, largest)
        return [answers[number] for number in range(len(requests))]

    def exchange(self, method: str, path: str, content: dict | None, largest: int) -> Reply:
        """Send one request and receive what the server replies."""
        body = None if content is None else json.dumps(content)
        headers = {} if content is None else {"Content-Type": "application/json"}
        scheme, _, place = self.address.partition("://")
        connection = CONNECTIONS[scheme](place, timeout=self.seconds)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            received = response.read(largest + 1)
            return Reply(response.status, received, not response.length)
        except TimeoutError:
            raise self.too_late() from None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: a chunk's size
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise self.error(f"no answer to {path} ({one_line(reason)})") from None
        finally:
            connection.close()

    def read(self, path: str, reply: Reply, largest: int) -> dict:
        """The JSON object of a reply."""
        if len(reply.body) > largest:
            raise self.error(f"its answer to {path} is longer than {largest / 2 ** 20:.1f} MiB")
        text = reply.body.decode(errors="replace")
        if 300 <= reply.status < 400:
            raise self.error(f"it answers {path} with a redirect, which is not followed")
        if reply.status != 200:
            sentence = f"it answers {path} with {reply.status}: {one_line(text)}"
            raise Refused(str(self.error(sentence)), reply.status)
        if not reply.is_whole:
            raise self.error(f"the connection was closed in the middle of its answer to {path}")
        try:
            return parse_object(text, f"its answer to {path}")
        except UserError as error:
            raise self.error(one_line(error)) from None

    def too_late(self) -> UserError:
        return self.error(f"no whole answer within {self.seconds:g} s")

    def error(self, what: str) -> UserError:
        return UserError(f"{self.flag} {self.address}: {what}")


def one_line(text) -> str:
    """What a server wrote, short enough to be shown."""
    return shortened(" ".join(str(text).split()), 200)
