"""What clients were promised, from what they said, and what of it a daemon keeps."""

from __future__ import annotations

from collections.abc import Iterator

from kvtierd import Client
from tests.torture.prompts import SPACE, keys_of, wrong_blocks
from tests.torture.storing_process import MOST_BLOCKS


class Promises:
    """By prompt: `must` is how many leading blocks have to be there, `may` how many can be."""

    def __init__(self) -> None:
        self.must: dict[int, int] = {}
        self.may: dict[int, int] = {}
        self.wrong: list[str] = []

    def take(self, line: str) -> None:
        """One line of a client. ValueError for a word that none says."""
        what, *words = line.split()
        match what:
            case "begun":
                prompt, count = map(int, words)
                self.may[prompt] = max(count, self.may.get(prompt, 0))
            case "flushed":
                for prompt, count in (map(int, word.split(":")) for word in words):
                    self.must[prompt] = max(count, self.must.get(prompt, 0))
            case "doomed":
                self.must.pop(int(words[0]), None)
            case "deleted":
                self.may[int(words[0])] = 0
            case "wrong":
                self.wrong.append(f"block {words[1]} of prompt {words[0]} was served with other bytes under load")
            case _:
                raise ValueError(f"a client said {line!r}")

    def check(self, client: Client) -> Iterator[str]:
        """What is not kept; afterwards what is found is what is promised, and what is not found never comes back."""
        yield from self.wrong
        self.wrong.clear()
        space = client.register(SPACE)
        for prompt in sorted(self.may):
            keys = keys_of(prompt, MOST_BLOCKS)
            found = client.fetch(space, keys)
            must, may = self.must.get(prompt, 0), self.may[prompt]
            if found.count < must:
                yield f"prompt {prompt}: {must} blocks were flushed and {found.count} are there"
            if found.count > may:
                yield f"prompt {prompt}: {found.count} blocks are there and {may} can be: deleted ones came back"
            for number in wrong_blocks(found.blocks[: found.count], keys):
                yield f"prompt {prompt}: block {number} has other bytes"
            self.may[prompt] = found.count
            if prompt in self.must:
                self.must[prompt] = found.count
