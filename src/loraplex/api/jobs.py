"""One prompt of `LLM` on its way: what the engine is asked, and what becomes of it. Reads no arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.api.local_engine import OpenSample
from loraplex.api.outputs import RequestOutput, output_of
from loraplex.catalog.records import Revision
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.request import SamplingParams
from loraplex.text.assembly import fewest_cached
from loraplex.text.codec import TextCodec
from loraplex.text.prefix_keys import PromptKeys
from loraplex.text.structured import form_grammar
from loraplex.text.tools.tool_use import ToolUse


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt. revision: None for the base, also where it answers instead of an adapter that was not
    invoked. tools: what the answer may call.
    """

    tokens: list[int]
    revision: Revision | None
    params: SamplingParams
    keys: PromptKeys
    codec: TextCodec | None
    tools: ToolUse | None = None

    def grammar(self, vocabulary: TextCodec | None) -> str | None:
        """What the answer must follow, if anything. vocabulary: the base's."""
        form = self.params.structured_outputs
        if form is not None and self.tools is not None:
            raise CallerError(
                ErrorCode.INVALID_REQUEST, f"{form.param} stands beside tools; give one", param=form.param
            )
        if form is not None:
            return form_grammar(form)
        return None if self.tools is None or vocabulary is None else self.tools.grammar(vocabulary)

    def output(self, samples: Sequence[OpenSample]) -> RequestOutput:
        """What its samples have come to."""
        return output_of(
            self.tokens,
            self.revision.name if self.revision is not None else None,
            self.params,
            [sample.answer for sample in samples],
            fewest_cached(sample.assembly for sample in samples),
        )
