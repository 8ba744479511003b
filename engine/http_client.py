"""JSON to a server and back, and one sentence for all that can go wrong on the way.

http.client follows no redirect and asks the environment for no proxy, so this talks to the address
that was given and to nothing else. Requests run side by side, since a server batches what arrives
together. They have one deadline for all: a server that sends a byte a minute is given up as well.
"""
import json
import queue
import re
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection

from engine.errors import UserError
from engine.files import LARGEST_JSON, parse_json
from engine.flags import shortened

AT_ONCE = 128  # requests under way; the others wait for their turn
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

    def all(self, requests: list[tuple]) -> list[dict]:
        """The answers to requests (method, path, content), in their order. The first request that
        fails ends the waiting for all."""
        waiting = queue.SimpleQueue()
        done = queue.SimpleQueue()
        for number_and_request in enumerate(requests):
            waiting.put(number_and_request)
        for _ in range(min(AT_ONCE, len(requests))):  # as daemons: none of them delays an exit
            threading.Thread(target=self.work, args=(waiting, done), daemon=True).start()
        deadline = time.monotonic() + self.seconds
        answers = {}
        while len(answers) < len(requests):
            number, answer = self.next_one(done, deadline)
            if isinstance(answer, UserError):
                raise answer
            answers[number] = answer
        return [answers[number] for number in range(len(requests))]

    def work(self, waiting: queue.SimpleQueue, done: queue.SimpleQueue) -> None:
        """Send what waits, one request after another; put each one's number and answer, or its
        error, into `done`."""
        while True:
            try:
                number, request = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, self.exchange(*request)))
            except UserError as error:
                done.put((number, error))

    def next_one(self, done: queue.SimpleQueue, deadline: float) -> tuple:
        """The next number with its answer or error, waited for until the deadline."""
        try:
            return done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise self.error(f"no whole answer within {self.seconds:g} s") from None

    def exchange(self, method: str, path: str, content: dict | None) -> dict:
        """One request, and the JSON object that the server answers."""
        body = None if content is None else json.dumps(content)
        headers = {} if content is None else {"Content-Type": "application/json"}
        scheme, _, place = self.address.partition("://")
        connection = CONNECTIONS[scheme](place, timeout=self.seconds)
        try:
            connection.request(method, path, body, headers)
            return self.read(path, connection.getresponse())
        except TimeoutError:
            raise self.error(f"no whole answer within {self.seconds:g} s") from None
        except (OSError, HTTPException, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise self.error(f"no answer to {path} ({one_line(reason)})") from None
        finally:
            connection.close()

    def read(self, path: str, response: HTTPResponse) -> dict:
        body = response.read(LARGEST_JSON + 1)
        if len(body) > LARGEST_JSON:
            raise self.error(f"its answer to {path} is longer than {LARGEST_JSON // 2 ** 20} MiB")
        text = body.decode(errors="replace")
        if 300 <= response.status < 400:
            raise self.error(f"it answers {path} with a redirect, which is not followed")
        if response.status != 200:
            raise self.error(f"it answers {path} with {response.status}: {one_line(text)}")
        if response.length:  # bytes that were promised and did not come
            raise self.error(f"the connection was closed in the middle of its answer to {path}")
        try:
            answer = parse_json(text)
        except ValueError as error:
            raise self.error(f"its answer to {path} is not JSON: {one_line(error)}") from None
        if not isinstance(answer, dict):
            raise self.error(f"its answer to {path} is not a JSON object")
        return answer

    def error(self, what: str) -> UserError:
        return UserError(f"{self.flag} {self.address}: {what}")


def one_line(text) -> str:
    """What a server wrote, short enough to be shown."""
    return shortened(" ".join(str(text).split()), 200)
