"""One message of `[alarm]` to the addresses in a file, through apprise, in a process that its parent can kill.

    python -P -m cuadrilla.train.notify FILE

reads the message, a JSON object, from standard input. FILE holds apprise's addresses, one a line. They are secrets:
nothing is printed, and the exit code is 1 if an address did not take the message.
"""

import json
import sys

MAX_MESSAGE_BYTES = 2**16
PLAIN = str.maketrans({"<": "‹", ">": "›", "@": "＠"})
"""In chats `<...>` is a link or calls people, and `@` calls people; words of other machines do neither."""


def main() -> None:
    import apprise

    message = json.loads(sys.stdin.buffer.read(MAX_MESSAGE_BYTES))
    config = apprise.AppriseConfig(sys.argv[1])
    service = apprise.Apprise()
    service.add(config)
    told = service.notify(
        title=message["title"].translate(PLAIN), body=message["text"].translate(PLAIN), body_format="text"
    )
    sys.exit(0 if told else 1)


if __name__ == "__main__":
    main()
