"""Prompts to token ids as requests need them: chat templates that take no tools have them described. Knows no request limits."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from shoal.model_files import prompts
from shoal.model_files.prompts import Prompt
from shoal.router.tools import with_tools_described

__all__ = ["ChatTemplate", "Prompt", "PromptEncoder"]


class ChatTemplate(prompts.ChatTemplate):
    """A template to which tools may be given whatever it takes."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text. A template that takes no tools finds them described in a system message."""
        if not self.takes_tools:
            messages, tools = with_tools_described(messages, tools), ()
        return super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt)


class PromptEncoder(prompts.PromptEncoder):
    """Turns text and chat messages, tools among them, into ids."""

    template_class: ClassVar[type[prompts.ChatTemplate]] = ChatTemplate
