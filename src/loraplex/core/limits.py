"""Every limit of the system, in one place, with its unit in its name.

A limit is a number that bounds memory or work; whoever hits one gets a typed error that names it. Options
that a user can decide live in the configuration, not here.
"""

from __future__ import annotations

from typing import Final

# Sampling
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 300
MAX_STOP_TOKEN_IDS: Final = 64
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 256
MAX_ALLOWED_TOKEN_IDS: Final = 4096
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARS: Final = 128
MAX_N: Final = 128
MAX_TOP_K: Final = 1 << 20
MAX_TEMPERATURE: Final = 100.0
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
"""Beyond these bounds float32 logits overflow, and what is drawn means nothing."""

# Adapters
MAX_RANK: Final = 512
MAX_ADAPTER_BYTES: Final = 16 << 30
MAX_ADAPTER_TENSORS: Final = 16_384
"""Five times what PEFT writes for 126 layers of seven linears with DoRA."""
MAX_TENSOR_NAME_CHARS: Final = 256
MAX_TENSOR_DIMS: Final = 8
"""An adapter's tensors have two at most; numpy has none of more than 64."""
MAX_ADAPTER_SHARDS: Final = 128
MAX_ADAPTER_FOLDER_FILES: Final = 4_096
"""Entries of an adapter's folder, whatever they are; a trainer's folder of checkpoints has hundreds."""
MAX_PATTERN_ENTRIES: Final = 4_096
"""Entries of `rank_pattern` and of `alpha_pattern`; PEFT writes one a module at most, of which 126 layers
have 884.
"""
MAX_PATTERNS_CHARS: Final = 128 << 10
"""Of the regular expressions among these entries, parsed in half a second; 884 of one whole name each have
44,000.
"""
MAX_LAYERS_PATTERNS: Final = 64
MAX_CHAT_TEMPLATE_CHARS: Final = 128 << 10
MAX_TOKENIZER_BYTES: Final = 32 << 20
"""Of a tokenizer.json beside an adapter; a vocabulary of 256,000 takes 20 MB."""
MAX_TOKENIZER_VALUES: Final = 2 << 20
"""Values of that file, counted by its commas before it is read; 256,000 tokens and as many merges have
1,300,000.
"""
MAX_TEMPLATE_CHARS_MADE: Final = 64 << 20
"""Characters that a render of an adapter's own template makes, those thrown away included."""
MAX_TEMPLATE_TIME_S: Final = 2.0
"""Of the thread's processor time; a long conversation through a usual template takes some ten milliseconds.
"""
MAX_TEMPLATE_WIDTH: Final = 10_000
MAX_TEMPLATE_NUMBER_BITS: Final = 4_096
MAX_ADDED_TOKENS: Final = 4_096
MAX_ADDED_TOKEN_CHARS: Final = 256
MAX_PATTERN_STEPS: Final = 4_000_000
"""Steps of matching a configuration's patterns against a base: some two seconds of one processor."""
MAX_ADAPTER_CONFIG_BYTES: Final = 4 << 20
MAX_SAFETENSORS_HEADER_BYTES: Final = 8 << 20
"""Twice what `MAX_ADAPTER_TENSORS` usual entries take; JSON of this size is decoded in a second and 200 MB.
"""
MAX_ALIAS_CHARS: Final = 128
MAX_SOURCE_CHARS: Final = 4096
MAX_ACTOR_CHARS: Final = 256
MAX_LISTED: Final = 1_000
DEFAULT_LISTED: Final = 100
"""Adapters of one page of a list: at most, and where the caller does not say."""
MAX_FOLDERS_BEFORE_READY: Final = 64
"""Folders of adapters that a start waits for; what lies beyond is registered while requests are served."""
MAX_DOWNLOADS: Final = 4
"""Remote sources that are read at a time, each by a process of 80 MB."""
MAX_PREPARE_S: Final = 600.0
"""How long reading, verifying, hashing and converting one adapter may take: the largest takes a minute of a
busy machine.
"""
MAX_PREPARE_REMOTE_S: Final = 4 * 3600.0
"""The same with its download: 16 GiB at a megabyte a second."""
PREPARE_MEMORY_SHARE: Final = 0.25
"""Part of the machine's memory that one preparation may hold, beside mapped files."""
MIN_PREPARE_BYTES: Final = 2 << 30
"""What it may hold on any machine."""

# Request records
MAX_REQUEST_RECORDS: Final = 1_000_000
"""Records of served requests that a catalog keeps; older ones go first."""
MAX_REQUEST_RECORDS_IN_MEMORY: Final = 2_000
"""The same without a durable catalog: the records lie in the server's own memory, some 1.4 KB each."""
MAX_REQUEST_RECORD_AGE_S: Final = 30 * 86_400
MAX_ATTEMPTS_SHOWN: Final = 100
MAX_UNWRITTEN_RECORDS: Final = 65_536
"""Records that wait to be written; at this many, new ones are counted and dropped."""

# Residency
MAX_LOAD_ATTEMPTS: Final = 3
"""Failed loads or fetches in a row after which those who wait for an adapter hear of it."""
LOAD_RETRY_NS: Final = 5_000_000
"""Pause after the first failure of a load; doubled by each further one."""
MAX_COPIES_IN_FLIGHT: Final = 4
"""Copies that a backend is given at a time; the others wait in order of purpose."""
MAX_COPIES_IN_FLIGHT_CUDA: Final = 16
"""The same where copies move beside the steps: a copy is known to have ended two or three steps after its
start.
"""
COPY_STARTS_CUDA: Final = 4
"""Copies that a step with rows starts there; each reads its image's tables in the step's own time, 0.3 ms of
a CPU.
"""
MAX_SPECULATIVE_LOADS: Final = 2
"""Loads that nobody waits for yet, at a time."""

# Prefix cache
PREFILL_TOKENS_PER_S_CPU: Final = 1_000
PREFILL_TOKENS_PER_S_CUDA: Final = 20_000
"""What computing a cached block again is priced at, beside what copying an adapter costs."""
MAX_BLOCKS_GIVEN_UP_AHEAD: Final = 256
"""Cached blocks that go at a time where one is needed: a full pool is asked for pages in nearly every step.
"""

# Scheduling
MAX_TTFT_DEADLINE_MS: Final = 86_400_000
TOKEN_BUDGET_CPU: Final = 512
TOKEN_BUDGET_CUDA: Final = 8192
MIXED_PREFILL_ROWS_CUDA: Final = 256
"""Prefill rows of a step that also decodes: it takes 2.5 times as long as without them (measured)."""
MIXED_PREFILL_ROWS_EACH_CUDA: Final = 2
"""So many more for each request that decodes."""
MIXED_ROWS_MULTIPLE_CUDA: Final = 128
"""Rows of a tile of the GEMMs."""
GROWTH_HORIZON_TOKENS: Final = 64
MAX_WAITING_REQUESTS: Final = 8192
MAX_TENANTS: Final = 10_000
"""Tenants whose limits stand in a key file."""
MAX_TENANT_WEIGHT: Final = 1_000
SERVICE_STARVED_NS: Final = 30_000_000_000
"""How long a tenant with a request that could run may complete nothing before an event says so."""
LOAD_STARVED_NS: Final = 60_000_000_000
"""How long a request may wait for an adapter that is not published before an event says so."""

# Transport
PAUSE_MS: Final = 2
"""How long a step that can do nothing waits for what no message brings: a compiled grammar, the end of a
retry's pause.
"""
MAX_BUFFERED_TOKENS: Final = 4096
"""Unread tokens of one request in a client process; at this many its reader counts as gone."""
MAX_UNSENT_FRAMES: Final = 4096
"""Frames that wait for one client process; at this many the engine gives the process up."""
MAX_UNSENT_EVENT_FRAMES: Final = 1024
"""Steps whose events wait for the server; the events of later ones are forgotten, and counted."""
MAX_FRAMES_PER_RECEIVE: Final = 1024

# HTTP
MAX_BODY_BYTES: Final = 8 << 20
"""Two million tokens of text; decoding so much holds the event loop up for some twenty milliseconds."""
SHORT_BODY_BYTES: Final = 32 << 10
"""A body up to here is decoded at once; a longer one is first looked through, outside the event loop."""
MAX_FIELD_BYTES: Final = 128 << 10
"""Of any field of a body but messages and prompt, as it was sent."""
MAX_MESSAGES: Final = 4096
MAX_CONTENT_PARTS: Final = 4096
"""Content parts of all messages of a conversation."""
MAX_TOOLS: Final = 128
MAX_TOOL_SCHEMA_BYTES: Final = 96 << 10
"""Schemas of all tools of a request, as JSON."""
SHORT_CONVERSATION: Final = 16
"""Messages up to here are put through a chat template in the event loop, if they are short."""
MAX_PROMPT_TOKENS: Final = 1 << 19
"""Token ids of all prompts of one HTTP request."""
MAX_SUBMITTED_TOKENS: Final = 1 << 22
"""Prompt tokens times samples of one HTTP request, which go to the engine in one message of 16 MB."""
TEXT_THREADS: Final = 2
"""Threads that read what callers sent; more would only take the interpreter from each other."""
MAX_WAITING_TEXTS: Final = 1024
"""Long texts, bodies and schemas that wait for one of these threads."""
SHORT_SCORES: Final = 256
"""Log probabilities up to here are written in the event loop."""
MAX_CONNECTIONS: Final = 16_384
"""Open connections, idle ones included; further ones wait to be accepted."""
RESERVED_FILES: Final = 256
"""Files that are kept for everything but connections."""
MAX_HEADER_BYTES: Final = 64 << 10
HEADER_TIMEOUT_S: Final = 15.0
BODY_TIMEOUT_S: Final = 60.0
"""From a request's headers to the end of its body: who sends slower holds a connection that others wait for.
"""
WRITE_TIMEOUT_S: Final = 20.0
"""How long a client may leave an answer where it is, once its connection is full."""
DRAIN_WRITE_TIMEOUT_S: Final = 1.0
"""The same while the server ends."""
MAX_LOGGED_PROMPT_CHARS: Final = 4096
MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_SCHEMA_DEPTH: Final = 32
"""Levels of a response schema; a compiler that recurses over it stays far from its stack's end."""
MAX_SCHEMA_MULTIPLE: Final = 100_000
"""Units of a `multipleOf`, of all that hold together: an automaton of so many states is built in about a
second.
"""
MAX_ERROR_CHARS: Final = 2_000
"""Of an error's message, of which a part may be what the caller sent."""
MAX_ERROR_PARAM_CHARS: Final = 256
MAX_PROMPT_LOGPROBS: Final = 1 << 19
"""Log probabilities of prompts in one answer, alternatives included: 16 MB of JSON, made in a good second."""
MAX_CHOICES: Final = 256
"""Prompts times samples of one HTTP request."""

# The operator's page
MAX_VIEWERS: Final = 32
"""Viewers of tenants other than the operator's."""
MAX_VIEWERS_OF_TENANT: Final = 8
PAGE_EVERY_S: Final = 1.0
"""How often the engine is asked for what the page shows, while somebody looks."""
PAGE_INSPECT_S: Final = 2.0
"""How long its answer is waited for."""
PAGE_ROWS: Final = 100
"""Adapters that one viewer is shown."""
PAGE_OWNERS: Final = 24
PAGE_WAITING: Final = 20
PAGE_ASKED: Final = 64
"""Waiting requests of which one viewer is told what the engine says that they wait for."""
PAGE_TENANTS: Final = 50
PAGE_SECONDS: Final = 120
PAGE_SAMPLES: Final = 512
"""Times to first token of one second that its median is taken from."""
PAGE_INCIDENTS: Final = 100
PAGE_TIMELINE_S: Final = 900
PAGE_ADAPTERS_REMEMBERED: Final = 4_096
PAGE_TENANTS_REMEMBERED: Final = 256
"""Adapters and tenants whose use the server remembers for the page; the last used stay."""
