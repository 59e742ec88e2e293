"""The model `shoal` of EleutherAI's lm-eval: scores and generates through a running router. Needs `pip install -e '.[eval]'`.

Continuations are scored by the Score call, which runs them as decode tokens under the request's visibility: what is measured
is the policy that is served. Importing this module registers the model; `python -m shoal.client.lm_eval_model` does that and
goes on with lm-eval's own command line.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

try:
    import lm_eval.models  # noqa: F401  # registers lm-eval's own; it does not do so by itself once there is another
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    words = f"lm-eval is not installed ({missing.name} is missing): pip install -e '.[eval]'"
    if __name__ == "__main__":
        sys.exit(words)
    raise ModuleNotFoundError(words, name=missing.name) from None

from shoal.client import Client, Message, Sampling, tls_credentials
from shoal.errors import InvalidConfig, InvalidRequest

_log = logging.getLogger(__name__)
_HARNESS: Final = ("batch_size", "max_batch_size", "device")  # given to every model; they mean nothing here
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_OURS: Final = ("until", "max_gen_toks", "max_new_tokens", "do_sample", *_SAMPLING)
Item = TypeVar("Item")
Result = TypeVar("Result")


@register_model("shoal")
class ShoalLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """`--model shoal --model_args address=127.0.0.1:50051,visibility=speed:22`."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        visibility: str | None = None,
        concurrency: int = 16,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        add_bos_token: bool = False,
        token: str | None = None,
        tls_ca: str | None = None,
        timeout_s: float = 600.0,
        **harness: Any,
    ) -> None:
        """`visibility`: the server's first when None. `max_length`: tokens of context and continuation, if less than the
        server's. `add_bos_token`: as lm-eval's own `hf` model takes it. Raises InvalidConfig for unknown arguments."""
        super().__init__()
        if unknown := [name for name in harness if name not in _HARNESS]:
            raise InvalidConfig(f"the model shoal takes no argument {unknown[0]!r}")
        credentials = tls_credentials(ca=tls_ca) if tls_ca is not None else None
        self.client = Client(address, credentials=credentials, token=token)
        self.info = self.client.model_info()
        self.visibility = visibility
        self.max_gen_toks = max_gen_toks
        self.max_length = min(max_length or self.info.max_context_length, self.info.max_context_length)
        self._concurrency, self._add_bos_token, self._timeout_s = int(concurrency), add_bos_token, timeout_s

    @property
    def eot_token_id(self) -> int:
        return int(self.info.eos_token_ids[0])

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that nothing precedes."""
        return int(self.info.bos_token_id) if self.info.HasField("bos_token_id") else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return f"{self.info.served_model_name}-{self.info.revision}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        add = self._add_bos_token if add_special_tokens is None else add_special_tokens
        return list(self.client.tokenize(string, raw=True, add_special_tokens=add)) if string else []

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The server's own; its name stands for it in lm-eval's records."""
        return f"the chat template of {self.tokenizer_name}" if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the server's template writes it."""
        if not add_generation_prompt:
            raise InvalidRequest("the model shoal cannot prefill an assistant's message; leave gen_prefix out")
        messages = [Message(turn["role"], turn["content"]) for turn in chat_history]
        return self.client.detokenize(self.client.tokenize(messages))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        def score(request: tuple[tuple[str, str], list[int], list[int]]) -> tuple[float, bool]:
            key, context, continuation = request
            result = self._score(context, continuation)
            if any(key):
                self.cache_hook.add_partial("loglikelihood", key, result)
            return result

        return self._map(score, requests, "Scoring", disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Each document apart, in windows of the context limit; every token is predicted once."""

        def score(request: Instance) -> float:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1
            )
            total = sum(self._score(*make_disjoint_window(window))[0] for window in windows)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return total

        return self._map(score, requests, "Scoring documents", disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy unless the task samples. A context that leaves no room for the answer loses its beginning."""

        def generate(request: Instance) -> str:
            context, options = request.args
            max_tokens, sampling = self._sampling(options)
            token_ids = self.tok_encode(context)[-(self.max_length - max_tokens) :]
            answer = self.client.complete(
                token_ids=token_ids, sampling=sampling, visibility=self.visibility, timeout_s=self._timeout_s
            )
            self.cache_hook.add_partial("generate_until", request.args, answer.text)
            return answer.text

        return self._map(generate, requests, "Generating", disable_tqdm)

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-probability, and whether greedy decoding would give it. What is too long loses its beginning."""
        if (num_over := len(context) + len(continuation) - self.max_length) > 0:
            _log.warning("a text exceeds the context limit of %d by %d tokens; it is cut on the left", self.max_length, num_over)
        continuation = continuation[-(self.max_length - 1) :]
        context = context[-(self.max_length - len(continuation)) :]
        found = self.client.score(context, continuation, visibility=self.visibility, timeout_s=self._timeout_s)
        return found.total_logprob, found.is_greedy

    def _sampling(self, options: dict[str, Any]) -> tuple[int, Sampling]:
        """A task's generation_kwargs. Raises InvalidRequest for those that mean nothing here."""
        if unknown := [name for name in options if name not in _OURS]:
            raise InvalidRequest(f"generation_kwargs: {unknown[0]} is not offered; use {', '.join(_OURS)}")
        until = options.get("until") or []
        wanted = int(options.get("max_gen_toks") or options.get("max_new_tokens") or self.max_gen_toks)
        max_tokens = min(wanted, self.max_length - 1)
        given = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
        if not options.get("do_sample", given.get("temperature", 0) > 0):
            given = {"temperature": 0.0}
        stop = (until,) if isinstance(until, str) else tuple(until)
        return max_tokens, Sampling(max_tokens=max_tokens, stop=stop, **given)

    def _map(self, call: Callable[[Item], Result], items: Iterable[Item], what: str, disable_tqdm: bool) -> list[Result]:
        """In the order of the items, so many at once. The first error ends all."""
        listed = list(items)
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="shoal-eval") as pool:
            try:
                return list(tqdm(pool.map(call, listed), total=len(listed), desc=what, disable=disable_tqdm))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def main() -> None:
    """lm-eval's own command line, which now knows the model."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
