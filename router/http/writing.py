"""Puts an answer together out of replies: choices by prompt and child, usage once, the extension beside the end.

Knows what OpenAI's two answers share; knows neither of them.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.errors import InternalError
from shoal.pb.v1 import shoal_pb2
from shoal.router.http.answers import Heading, Usage, extension
from shoal.router.http.replies import Reply

Body = dict[str, Any]


class Choice(Protocol):
    """One choice as it grows."""

    def chunks(self, chunk: shoal_pb2.GenerateStreamChunk) -> list[Body]: ...

    def last_chunks(self, complete: shoal_pb2.GenerateComplete) -> list[Body]: ...

    def whole(self, complete: shoal_pb2.GenerateComplete) -> Body: ...


@dataclass(slots=True)
class Writer:
    """One answer. `make_choice(prompt, index)` makes a choice when it is first heard of."""

    heading: Heading
    num_children: int  # choices of each prompt
    make_choice: Callable[[int, int], Choice]
    include_usage: bool
    shows_completion: bool = True
    _choices: dict[int, Choice] = field(default_factory=dict)

    async def events(self, replies: AsyncGenerator[Reply, None]) -> AsyncGenerator[Body, None]:
        """Chunks of a stream, each about one choice; the usage last, when it is wanted."""
        usage = Usage()
        more: Body = {"usage": None} if self.include_usage else {}
        async with aclosing(replies):
            async for prompt, reply in replies:
                if reply.HasField("complete"):
                    usage.add(prompt, reply.complete, shown=self.shows_completion)
                    *earlier, last = self._choice(prompt, reply.complete.index).last_chunks(reply.complete)
                    for entry in earlier:
                        yield self.heading.body([entry], **more)
                    yield self.heading.body([last], shoal=extension(reply.complete), **more)
                else:
                    for entry in self._choice(prompt, reply.chunk.index).chunks(reply.chunk):
                        yield self.heading.body([entry], **more)
        if self.include_usage:
            yield self.heading.body([], usage=usage.body())

    async def whole(self, replies: AsyncGenerator[Reply, None]) -> Body:
        """The body of an answer that is not streamed. With several choices each carries its own extension too."""
        usage, completes = Usage(), dict[tuple[int, int], shoal_pb2.GenerateComplete]()
        async with aclosing(replies):
            async for prompt, reply in replies:
                if reply.HasField("complete"):
                    usage.add(prompt, reply.complete, shown=self.shows_completion)
                    completes[prompt, reply.complete.index] = reply.complete
        if not completes:
            raise InternalError("the service ended without an answer")
        ordered = sorted(completes.items())  # a prompt's first child tells of the prompt
        entries = [self._choice(*key).whole(complete) for key, complete in ordered]
        extensions = [extension(complete) for _, complete in ordered]
        if len(entries) > 1:
            entries = [entry | {"shoal": told} for entry, told in zip(entries, extensions, strict=True)]
        return self.heading.body(entries, usage=usage.body(), shoal=extensions[0])

    def _index(self, prompt: int, child: int) -> int:
        return prompt * self.num_children + child

    def _choice(self, prompt: int, child: int) -> Choice:
        index = self._index(prompt, child)
        if index not in self._choices:
            self._choices[index] = self.make_choice(prompt, index)
        return self._choices[index]
