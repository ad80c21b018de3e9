"""The error tree: what went wrong, whose fault it is, and one stable code for each violated invariant.

    LoraplexError
    |-- CallerError      4xx: the caller can mend it; nothing of the server changed
    |-- CapacityError    429 / 503: nothing is wrong, a named limit was hit; the same call may work later
    `-- InternalFault    500: our invariant broke; the step rolls back, the request ends, the server lives

`CODES` is the only list of codes: `docs/errors.md` is generated from it, tests read it, and an error cannot
be raised with a code that is not in it. A code is never reused for another invariant.

Specification: 0x0DA (a failure record's coordinates), rulings "Errors".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Root(StrEnum):
    """Whose fault it is."""

    CALLER = "caller"
    CAPACITY = "capacity"
    OURS = "ours"


class ErrorCode(StrEnum):
    """Stable machine-readable codes; the value is what clients see in `error.code`."""

    # Requests
    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_OPTION = "unsupported_option"
    INVALID_SAMPLING = "invalid_sampling"
    EMPTY_PROMPT = "empty_prompt"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    DUPLICATE_REQUEST = "duplicate_request"
    TOKENIZER_MISSING = "tokenizer_missing"
    INVOCATION_MISSING = "invocation_missing"
    REQUEST_TOO_LARGE = "request_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    ABORTED = "aborted"
    SLOW_CLIENT = "slow_client"
    SCHEMA_UNSUPPORTED = "schema_unsupported"
    # Models
    MODEL_UNSUPPORTED = "model_unsupported"
    MODEL_WEIGHTS_INVALID = "model_weights_invalid"
    MODEL_SOURCE_MISSING = "model_source_missing"
    MODEL_CACHE_UNWRITABLE = "model_cache_unwritable"
    MODEL_CACHE_DAMAGED = "model_cache_damaged"
    CONFIG_INVALID = "config_invalid"
    # Adapters
    ADAPTER_NOT_FOUND = "adapter_not_found"
    ADAPTER_EXISTS = "adapter_exists"
    ADAPTER_SOURCE_MISSING = "adapter_source_missing"
    ADAPTER_SOURCE_FORBIDDEN = "adapter_source_forbidden"
    ADAPTER_CONFIG_INVALID = "adapter_config_invalid"
    ADAPTER_UNSUPPORTED = "adapter_unsupported"
    ADAPTER_FILE_MALFORMED = "adapter_file_malformed"
    ADAPTER_FILE_PICKLE = "adapter_file_pickle"
    ADAPTER_TENSOR_UNMATCHED = "adapter_tensor_unmatched"
    ADAPTER_TENSOR_MISSING = "adapter_tensor_missing"
    ADAPTER_SHAPE_MISMATCH = "adapter_shape_mismatch"
    ADAPTER_RANK_MISMATCH = "adapter_rank_mismatch"
    ADAPTER_RANK_LIMIT = "adapter_rank_limit"
    ADAPTER_NOT_FINITE = "adapter_not_finite"
    ADAPTER_DTYPE_UNSUPPORTED = "adapter_dtype_unsupported"
    ADAPTER_BASE_MISMATCH = "adapter_base_mismatch"
    ADAPTER_TOO_LARGE = "adapter_too_large"
    ADAPTER_TOO_COSTLY = "adapter_too_costly"
    ADAPTER_LOAD_FAILED = "adapter_load_failed"
    ADAPTER_REVISION_CONFLICT = "adapter_revision_conflict"
    ADAPTER_SOURCE_CHANGED = "adapter_source_changed"
    ADAPTER_SOURCE_UNPINNED = "adapter_source_unpinned"
    MANIFEST_INVALID = "manifest_invalid"
    CATALOG_CONFLICT = "catalog_conflict"
    REQUEST_NOT_FOUND = "request_not_found"
    ADAPTER_REVOKED = "adapter_revoked"
    # Capacity
    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    TOO_MANY_VIEWERS = "too_many_viewers"
    POOL_EXHAUSTED = "pool_exhausted"
    ADAPTER_SLOTS_EXHAUSTED = "adapter_slots_exhausted"
    HOST_MEMORY_EXHAUSTED = "host_memory_exhausted"
    REQUEST_EXCEEDS_POOL = "request_exceeds_pool"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    SHUTTING_DOWN = "shutting_down"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    EARLY_ABORT = "early_abort"
    CATALOG_UNAVAILABLE = "catalog_unavailable"
    ADAPTER_SOURCE_UNAVAILABLE = "adapter_source_unavailable"
    ARTIFACT_STORE_FULL = "artifact_store_full"
    # Ours: identity and launch
    IDENTITY_INVALID = "identity_invalid"
    CATALOG_RECORD_INVALID = "catalog_record_invalid"
    GENERATION_NAMESPACE = "generation_namespace"
    STALE_REQUEST_GENERATION = "stale_request_generation"
    STALE_SLOT_GENERATION = "stale_slot_generation"
    STALE_PLAN_GENERATION = "stale_plan_generation"
    STALE_KV_FRONTIER = "stale_kv_frontier"
    LEASE_MISMATCH = "lease_mismatch"
    # Ours: plan
    PLAN_MALFORMED = "plan_malformed"
    PLAN_ROW_COVERAGE = "plan_row_coverage"
    PLAN_PHASE_BOUNDARY = "plan_phase_boundary"
    PLAN_SEGMENTS = "plan_segments"
    PLAN_GROUPS = "plan_groups"
    PLAN_SAMPLE_ROWS = "plan_sample_rows"
    PLAN_MASKS = "plan_masks"
    PLAN_PAGE_TABLE = "plan_page_table"
    PLAN_TOKEN_REFERENCE = "plan_token_reference"
    PLAN_POSITION = "plan_position"
    RESULT_MALFORMED = "result_malformed"
    # Ours: operators
    OPERATOR_RANK_UNSUPPORTED = "operator_rank_unsupported"
    OPERATOR_LAYOUT = "operator_layout"
    OPERATOR_PLAN_UNSUPPORTED = "operator_plan_unsupported"
    # Ours: memory
    PAGE_STATE = "page_state"
    PAGE_OWNER = "page_owner"
    PAGE_FENCE = "page_fence"
    PAGE_CONSERVATION = "page_conservation"
    PREFIX_RECEIPT = "prefix_receipt"
    RESIDENCY_TRANSITION = "residency_transition"
    TRANSACTION_STATE = "transaction_state"
    COPY_CHECKSUM = "copy_checksum"
    LEASE_UNDERFLOW = "lease_underflow"
    HOST_TIER_STATE = "host_tier_state"
    EVICTION_INELIGIBLE = "eviction_ineligible"
    # Ours: scheduling
    SNAPSHOT_IDENTITY = "snapshot_identity"
    SNAPSHOT_COUNT = "snapshot_count"
    SNAPSHOT_SHAPE = "snapshot_shape"
    SNAPSHOT_GENERATION = "snapshot_generation"
    SNAPSHOT_RESIDENCY = "snapshot_residency"
    # Ours: service
    SERVICE_LEDGER = "service_ledger"
    # Ours: scheduling ahead
    PREFETCH_LEDGER = "prefetch_ledger"
    ABORT_LEDGER = "abort_ledger"
    COST_TABLE = "cost_table"
    PLACEMENT_SNAPSHOT = "placement_snapshot"
    # Ours: execution
    NUMERIC_FAULT = "numeric_fault"
    BACKEND_FAILED = "backend_failed"
    ENGINE_DIED = "engine_died"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """What a code means: its root, the HTTP status that carries it, and the invariant it reports."""

    root: Root
    status: int
    invariant: str


def _caller(status: int, invariant: str) -> CodeInfo:
    return CodeInfo(Root.CALLER, status, invariant)


def _capacity(status: int, invariant: str) -> CodeInfo:
    return CodeInfo(Root.CAPACITY, status, invariant)


def _ours(invariant: str) -> CodeInfo:
    return CodeInfo(Root.OURS, 500, invariant)


_E = ErrorCode
CODES: Final[dict[ErrorCode, CodeInfo]] = {
    _E.INVALID_REQUEST: _caller(400, "a request is well-formed JSON with known fields of the right types"),
    _E.UNSUPPORTED_OPTION: _caller(400, "every accepted option is carried out; others are refused by name"),
    _E.INVALID_SAMPLING: _caller(400, "each sampling parameter lies in its documented range"),
    _E.EMPTY_PROMPT: _caller(400, "a prompt has at least one token"),
    _E.TOKEN_OUT_OF_RANGE: _caller(400, "every token id lies inside the model's vocabulary"),
    _E.CONTEXT_LENGTH_EXCEEDED: _caller(400, "prompt plus requested output fit into the model's context"),
    _E.MODEL_NOT_FOUND: _caller(404, "the model field names the base, an alias or alias@revision"),
    _E.DUPLICATE_REQUEST: _caller(400, "a request id names at most one live request"),
    _E.TOKENIZER_MISSING: _caller(400, "text needs a tokenizer; a folder without one serves token ids"),
    _E.INVOCATION_MISSING: _caller(
        400,
        "an activated adapter acts from its invocation on; a prompt without it is answered by the base only "
        "if asked",
    ),
    _E.REQUEST_TOO_LARGE: _caller(413, "a request body stays under the configured size"),
    _E.REQUEST_TIMEOUT: _caller(408, "a request body arrives whole within the time limit"),
    _E.UNAUTHENTICATED: _caller(401, "the caller presents a known API key where keys are required"),
    _E.FORBIDDEN: _caller(403, "the caller's role permits the operation"),
    _E.NOT_FOUND: _caller(404, "the path names something that is served"),
    _E.METHOD_NOT_ALLOWED: _caller(405, "the path is called with a method that it supports"),
    _E.ABORTED: _caller(499, "the caller withdrew the request"),
    _E.SLOW_CLIENT: _caller(499, "a client reads its stream faster than its buffer's limit fills"),
    _E.SCHEMA_UNSUPPORTED: _caller(400, "a response schema is one that can be enforced exactly"),
    _E.MODEL_UNSUPPORTED: _caller(400, "every feature of the model configuration is implemented"),
    _E.MODEL_WEIGHTS_INVALID: _caller(
        400, "the weights hold exactly the tensors that the configuration implies"
    ),
    _E.MODEL_SOURCE_MISSING: _caller(400, "the model source exists and can be read"),
    _E.MODEL_CACHE_UNWRITABLE: _caller(400, "the cache of converted models can be created and written"),
    _E.MODEL_CACHE_DAMAGED: _caller(400, "a converted model keeps the files with which it was published"),
    _E.CONFIG_INVALID: _caller(400, "each server option lies in its documented range"),
    _E.ADAPTER_NOT_FOUND: _caller(404, "the alias or revision is registered"),
    _E.ADAPTER_EXISTS: _caller(400, "an add names an alias that is not registered yet"),
    _E.ADAPTER_SOURCE_MISSING: _caller(404, "the adapter source exists and can be read"),
    _E.ADAPTER_SOURCE_FORBIDDEN: _caller(403, "an adapter path resolves into an allowed root"),
    _E.ADAPTER_CONFIG_INVALID: _caller(400, "adapter_config.json is complete and consistent"),
    _E.ADAPTER_UNSUPPORTED: _caller(400, "every adapter feature that has an effect is implemented exactly"),
    _E.ADAPTER_FILE_MALFORMED: _caller(400, "adapter weights are a valid safetensors file"),
    _E.ADAPTER_FILE_PICKLE: _caller(400, "adapter weights are not a pickle; convert them to safetensors"),
    _E.ADAPTER_TENSOR_UNMATCHED: _caller(400, "every tensor of the file is applied to a module of the base"),
    _E.ADAPTER_TENSOR_MISSING: _caller(400, "every target of the configuration has its tensors"),
    _E.ADAPTER_SHAPE_MISMATCH: _caller(400, "factor shapes agree with the base module"),
    _E.ADAPTER_RANK_MISMATCH: _caller(400, "factor ranks agree with the configuration"),
    _E.ADAPTER_RANK_LIMIT: _caller(400, "a rank is at least 1 and at most the supported maximum"),
    _E.ADAPTER_NOT_FINITE: _caller(400, "factors hold finite numbers"),
    _E.ADAPTER_DTYPE_UNSUPPORTED: _caller(400, "factors are float32, float16 or bfloat16"),
    _E.ADAPTER_BASE_MISMATCH: _caller(400, "the adapter was made for a base of this shape"),
    _E.ADAPTER_TOO_LARGE: _caller(400, "the empty pool could hold the adapter"),
    _E.ADAPTER_TOO_COSTLY: _caller(400, "an adapter is prepared within its bounds of time and memory"),
    _E.ADAPTER_LOAD_FAILED: _ours("a verified artifact reaches the device unchanged"),
    _E.ADAPTER_REVISION_CONFLICT: _caller(409, "a swap replaces the revision that it expected"),
    _E.ADAPTER_SOURCE_CHANGED: _caller(409, "the source still holds the artifact that the revision names"),
    _E.ADAPTER_SOURCE_UNPINNED: _caller(400, "a source on a hub names one commit, not a branch or tag"),
    _E.MANIFEST_INVALID: _caller(400, "a manifest that an adapter is compared with reads and holds"),
    _E.CATALOG_CONFLICT: _caller(409, "a change is made to the catalog generation that it expected"),
    _E.REQUEST_NOT_FOUND: _caller(404, "the request was served here and its record is still kept"),
    _E.ADAPTER_REVOKED: _caller(410, "nothing runs or registers a revision that was revoked"),
    _E.QUEUE_FULL: _capacity(429, "waiting requests stay under the queue limit"),
    _E.TENANT_QUEUE_FULL: _capacity(
        429, "a tenant's waiting requests stay under the limit that it was given"
    ),
    _E.TOO_MANY_VIEWERS: _capacity(429, "those who look at the operator's page stay under its limits"),
    _E.POOL_EXHAUSTED: _capacity(429, "the page pool can be made to hold what the call needs"),
    _E.ADAPTER_SLOTS_EXHAUSTED: _capacity(429, "resident adapters stay under the slot limit"),
    _E.HOST_MEMORY_EXHAUSTED: _capacity(429, "host images of adapters stay under the host limit"),
    _E.REQUEST_EXCEEDS_POOL: _caller(400, "the empty pool could hold the request"),
    _E.ENGINE_UNAVAILABLE: _capacity(503, "the engine process is up and ready"),
    _E.SHUTTING_DOWN: _capacity(503, "the server accepts work until it drains"),
    _E.DEADLINE_EXCEEDED: _capacity(503, "a request with a deadline starts before it"),
    _E.EARLY_ABORT: _capacity(503, "under early abort, a first token can come within the limit"),
    _E.CATALOG_UNAVAILABLE: _capacity(503, "the catalog's database answers"),
    _E.ADAPTER_SOURCE_UNAVAILABLE: _capacity(503, "the adapter's remote source answers"),
    _E.ARTIFACT_STORE_FULL: _capacity(429, "adapters of current revisions fit into the artifact store"),
    _E.CATALOG_RECORD_INVALID: _ours("a catalog record is whole and its digests follow from each other"),
    _E.IDENTITY_INVALID: _ours("a digest covers exactly the record that it names"),
    _E.GENERATION_NAMESPACE: _ours("generations are compared within one namespace only"),
    _E.STALE_REQUEST_GENERATION: _ours("a plan names the current incarnation of each request slot"),
    _E.STALE_SLOT_GENERATION: _ours("a plan names the published generation of each adapter slot"),
    _E.STALE_PLAN_GENERATION: _ours("plans run in order, each exactly once"),
    _E.STALE_KV_FRONTIER: _ours("a row appends at its request's planned KV frontier"),
    _E.LEASE_MISMATCH: _ours("a row runs the revision that its request leased"),
    _E.PLAN_MALFORMED: _ours("a packed plan has a valid header and section table"),
    _E.PLAN_ROW_COVERAGE: _ours("each packed row belongs to exactly one request"),
    _E.PLAN_PHASE_BOUNDARY: _ours("prefill rows end and decode rows begin at doff"),
    _E.PLAN_SEGMENTS: _ours("adapter segments tile all rows and agree with their requests"),
    _E.PLAN_GROUPS: _ours("grouped rows cover each active row exactly once under its adapter"),
    _E.PLAN_SAMPLE_ROWS: _ours("each sample row is a logit row of its own request"),
    _E.PLAN_MASKS: _ours("a token mask belongs to one sample, spans the vocabulary and allows a token"),
    _E.PLAN_PAGE_TABLE: _ours("page-table deltas name owned pages inside their bounds"),
    _E.PLAN_TOKEN_REFERENCE: _ours("a token is an id or a reference into the step before"),
    _E.PLAN_POSITION: _ours("positions of a request's rows are consecutive"),
    _E.RESULT_MALFORMED: _ours("a step result answers exactly the plan that it names"),
    _E.OPERATOR_RANK_UNSUPPORTED: _ours("an operator family runs only ranks that it supports"),
    _E.OPERATOR_LAYOUT: _ours("factor extents agree with rank and dimensions"),
    _E.OPERATOR_PLAN_UNSUPPORTED: _ours("an operator family runs only plans that it supports"),
    _E.PAGE_STATE: _ours("a page changes state only along the allowed edges"),
    _E.PAGE_OWNER: _ours("a page has exactly one owner"),
    _E.PAGE_FENCE: _ours("a page is overwritten only after the last launch that may name it"),
    _E.PAGE_CONSERVATION: _ours("free, reserved, adapter, KV and prefix pages add up to the pool"),
    _E.PREFIX_RECEIPT: _ours(
        "a cached block is found under its whole history, held with its parent, and given back once"
    ),
    _E.RESIDENCY_TRANSITION: _ours("residency changes only along the transition table"),
    _E.TRANSACTION_STATE: _ours("a transaction is open until it commits or rolls back, once"),
    _E.COPY_CHECKSUM: _ours("device bytes equal the verified host bytes"),
    _E.LEASE_UNDERFLOW: _ours("a lease is released exactly once"),
    _E.HOST_TIER_STATE: _ours("host images are fetched, held and dropped in order, and their bytes add up"),
    _E.EVICTION_INELIGIBLE: _ours("only unreferenced, host-backed adapters are evicted"),
    _E.SNAPSHOT_IDENTITY: _ours("a scheduler's snapshot names requests, bases and artifacts"),
    _E.SNAPSHOT_COUNT: _ours("pages, ranks, slots and bytes of a scheduler's snapshot are counts"),
    _E.SNAPSHOT_SHAPE: _ours("parts of a scheduler's snapshot are of their kind and belong together"),
    _E.SNAPSHOT_GENERATION: _ours(
        "generations of a scheduler's snapshot begin at 1 and belong to an adapter"
    ),
    _E.SNAPSHOT_RESIDENCY: _ours("what a scheduler's snapshot calls published is resident or retiring"),
    _E.SERVICE_LEDGER: _ours(
        "completed work is debited once, to its tenant, and a request waits or runs and is counted so"
    ),
    _E.PREFETCH_LEDGER: _ours("loads ahead draw on one ledger of counts, each adapter once"),
    _E.ABORT_LEDGER: _ours("each offered request is served, rejected, ended otherwise or open, once"),
    _E.COST_TABLE: _ours("a cost table prices every group of requests that it is asked about"),
    _E.PLACEMENT_SNAPSHOT: _ours("each request is on one worker, within that worker's bounds"),
    _E.NUMERIC_FAULT: _ours("logits are finite"),
    _E.BACKEND_FAILED: _ours("a launched step returns a result"),
    _E.ENGINE_DIED: _capacity(503, "the engine process survives its requests"),
    _E.INTERNAL: _ours("no unexpected exception reaches a caller"),
}


class LoraplexError(Exception):
    """Base of all typed errors.

    code: the violated invariant; message: one sentence for a person (what was refused, the value seen, the
    expectation, what to do); param: the request field or record field at fault, if one is.
    """

    root: Root

    def __init__(self, code: ErrorCode, message: str, *, param: str | None = None) -> None:
        info = CODES[code]
        if info.root is not self.root:
            raise TypeError(f"code {code} belongs to root {info.root}, not {self.root}")
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    @property
    def status(self) -> int:
        """HTTP status that carries this error."""
        return CODES[self.code].status

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.code.value, self.message, self.param))

    def __str__(self) -> str:
        return f"{self.message} [{self.code.value}]"


class CallerError(LoraplexError):
    """The caller asked for something that cannot be done as asked."""

    root = Root.CALLER


class CapacityError(LoraplexError):
    """A named limit was hit; the same call may succeed later."""

    root = Root.CAPACITY


class InternalFault(LoraplexError):
    """One of our own invariants broke."""

    root = Root.OURS


_BY_ROOT: Final[dict[Root, type[LoraplexError]]] = {
    Root.CALLER: CallerError,
    Root.CAPACITY: CapacityError,
    Root.OURS: InternalFault,
}


def error_for(code: ErrorCode, message: str, *, param: str | None = None) -> LoraplexError:
    """The error of the class that `code` belongs to, for messages that crossed a process."""
    return _BY_ROOT[CODES[code].root](code, message, param=param)


def _rebuild(code: str, message: str, param: str | None) -> LoraplexError:
    return error_for(ErrorCode(code), message, param=param)
