"""`LLM`: the offline, in-process API, and what it may be given."""

from loraplex.api.llm import LLM
from loraplex.api.outputs import RequestOutput, Sample

__all__ = ["LLM", "RequestOutput", "Sample"]
