"""Failures of residency, life cycle, cached KV, scheduling and claims: 0x0DB, loops 5 and 7 to 10.

Owns those records. Tests that an entry names are in the repository beside the package.
"""

from __future__ import annotations

from typing import Final

from loraplex.core.errors import ErrorCode
from loraplex.telemetry.failure_record import BOOKS, MUTANT, Capability, Failure, Gate, Outcome

_ACCOUNTS: Final = "tests/engine/test_accounts.py"
_CONTROLS: Final = "tests/adapters/test_controls.py"
_EXECUTION: Final = "tests/identity/test_execution.py"
_FAILED_LOADS: Final = "tests/engine/test_failed_loads.py"
_LIFECYCLE: Final = "tests/engine/test_lifecycle.py"
_PREFIXES: Final = "tests/engine/test_prefixes.py"

LIFECYCLE: Final = (
    Failure(
        "registered_called_resident",
        loop=5,
        invariant="registration, reservation, copy, validation, publication and use are states of their own",
        detectors=(ErrorCode.RESIDENCY_TRANSITION, ErrorCode.STALE_SLOT_GENERATION),
        consequence="a launch reads factors that are absent or half there",
        outcome=Outcome.FAIL_CLOSED,
        owner="engine/residency/transitions.py",
        tests=(
            f"{BOOKS}[residency_transition]",
            "tests/model/test_runner_adapters.py::test_rows_bind_only_the_published_generation",
        ),
    ),
    Failure(
        "publication_before_copy_validation",
        loop=5,
        invariant="a copy ends, is compared with its host bytes, and only then is published",
        detectors=(
            ErrorCode.COPY_CHECKSUM,
            ErrorCode.ADAPTER_LOAD_FAILED,
            "loraplex_load_failures_total",
            "sim/checks.py::Checkers.on_plan",
        ),
        consequence="a kernel reads partial or stale bytes",
        outcome=Outcome.QUEUE,
        owner="engine/residency/loads.py",
        tests=(
            f"{MUTANT}[a_slot_is_published_when_its_copy_starts]",
            f"{MUTANT}[a_damaged_copy_is_published]",
            "tests/engine/test_step.py::test_torn_copy_never_serves",
            f"{_LIFECYCLE}::test_a_failed_copy_is_never_published_and_its_slot_is_never_named",
        ),
    ),
    Failure(
        "eviction_eligibility_bypassed",
        loop=5,
        invariant="what is evicted has no reference, pin, reservation or launch that may still name it",
        detectors=(ErrorCode.EVICTION_INELIGIBLE, "sim/checks.py::Checkers.on_event"),
        consequence="bytes in use are overwritten",
        outcome=Outcome.FAIL_CLOSED,
        owner="memory/eviction.py",
        tests=(
            f"{BOOKS}[eviction_ineligible]",
            "tests/engine/test_residency.py::test_what_a_waiting_request_has_reserved_is_nobodys_victim",
            f"{MUTANT}[eviction_ignores_leases]",
            f"{MUTANT}[eviction_ignores_pins]",
        ),
    ),
    Failure(
        "rollback_owner_leak",
        loop=5,
        invariant="a failed admission restores its victims and frees every page that it reserved",
        detectors=(
            ErrorCode.PAGE_CONSERVATION,
            ErrorCode.PAGE_OWNER,
            ErrorCode.PAGE_STATE,
            "loraplex_restoration_failures_total",
        ),
        consequence="pages leak, or the catalog names overwritten bytes",
        outcome=Outcome.QUEUE,
        owner="memory/transaction.py",
        tests=(
            f"{MUTANT}[a_rollback_keeps_its_pages]",
            f"{BOOKS}[page_conservation]",
            f"{_FAILED_LOADS}::test_victims_come_back_under_a_fresh_generation_when_the_load_fails",
            f"{_FAILED_LOADS}::test_a_failed_restoration_leaves_the_victim_absent_and_pages_conserved",
        ),
    ),
    Failure(
        "arithmetic_unmerge_called_rollback",
        loop=7,
        invariant="the way back loads the immutable base and a tested adapter again",
        detectors=(),
        consequence="the base drifts by what rounding lost",
        outcome=Outcome.FAIL_CLOSED,
        owner="adapters/lifecycle.py",
        tests=("tests/exact/test_hot_swap.py::test_arithmetic_unmerge_is_no_rollback",),
        needs=Capability.MERGE,
    ),
    Failure(
        "hotswap_without_generation_lease",
        loop=7,
        invariant="a request under way keeps the one generation that it leased",
        detectors=(
            ErrorCode.LEASE_MISMATCH,
            ErrorCode.LEASE_UNDERFLOW,
            ErrorCode.STALE_REQUEST_GENERATION,
            "sim/checks.py::Checkers.on_plan",
        ),
        consequence="old and new factors make one answer",
        outcome=Outcome.FAIL_CLOSED,
        owner="memory/leases.py",
        tests=(
            f"{MUTANT}[a_request_binds_what_its_name_means_now]",
            f"{BOOKS}[lease_mismatch]",
            "tests/engine/test_malformed_messages.py::test_a_launch_needs_its_requests_alive[lease]",
        ),
    ),
    Failure(
        "retiring_slot_reclaimed_early",
        loop=7,
        invariant="a slot is used again only when nobody counts on it and its last launch is complete",
        detectors=(ErrorCode.PAGE_FENCE, "sim/checks.py::Checkers.on_plan"),
        consequence="a new adapter overwrites bytes that a kernel reads",
        outcome=Outcome.QUEUE,
        owner="engine/residency/transitions.py",
        tests=(
            f"{MUTANT}[pages_are_reused_while_a_launch_names_them]",
            f"{MUTANT}[a_slot_lease_does_not_count]",
            f"{BOOKS}[page_fence]",
        ),
    ),
    Failure(
        "postpublication_recovery_called_rollback",
        loop=7,
        invariant="before publication a failure is rolled back, after it another generation is published",
        detectors=(ErrorCode.TRANSACTION_STATE, "catalog/schema.py::_guards"),
        consequence="receipts stand for state that was rewritten in place",
        outcome=Outcome.FAIL_CLOSED,
        owner="adapters/manager.py",
        tests=(
            f"{BOOKS}[transaction_state]",
            "tests/catalog/test_store.py::test_the_database_itself_keeps_what_is_immutable",
            f"{_CONTROLS}::test_what_the_engine_refuses_after_a_publication_does_not_undo_it",
        ),
    ),
    Failure(
        "kv_dependency_closure_omitted",
        loop=8,
        invariant="KV is shared only where nothing that acts reaches a row of it, in any layer",
        detectors=("identity/closure.py::changes_kv", "sim/histories.py::Histories.on_plan"),
        consequence="cached rows of another function are read",
        outcome=Outcome.RECOMPUTE,
        owner="identity/closure.py",
        tests=(
            f"{MUTANT}[an_adapter_of_the_layers_counts_as_the_base]",
            f"{_EXECUTION}::test_what_the_graph_does_not_know_is_an_ancestor_of_everything",
        ),
    ),
    Failure(
        "alora_interval_boundary_drift",
        loop=8,
        invariant="an activated adapter acts, and taints, from the first token of the last invocation on",
        detectors=(
            ErrorCode.INVOCATION_MISSING,
            "sim/checks.py::Checkers.on_plan",
            "sim/histories.py::Histories.on_plan",
        ),
        consequence="factors act on the wrong rows, or rows get the wrong key",
        outcome=Outcome.REJECT,
        owner="identity/activation.py",
        tests=(
            f"{MUTANT}[a_key_forgets_what_acts_after_the_boundary]",
            f"{_PREFIXES}::test_an_invocation_that_the_prompt_does_not_hold_is_refused[before]",
            "tests/server/test_activated.py::test_without_an_invocation_it_is_refused",
        ),
    ),
    Failure(
        "prefix_identity_incomplete",
        loop=8,
        invariant="a key covers the whole history: tokens, what acts in each interval, namespace, cache ABI",
        detectors=(ErrorCode.PREFIX_RECEIPT, "sim/histories.py::Histories.on_plan"),
        consequence="a hit across adapters or tenants",
        outcome=Outcome.FAIL_CLOSED,
        owner="identity/cache.py",
        tests=(
            f"{MUTANT}[a_key_leaves_its_parent_out]",
            f"{MUTANT}[a_foreign_namespace_is_looked_up]",
            "tests/engine/test_prefixes.py::test_keys_that_are_no_chain_end_their_request_and_nobody_elses",
        ),
    ),
    Failure(
        "prompt_logit_equivalence_overclaimed",
        loop=8,
        invariant="equal KV, hidden states, prompt logits and continuations are four questions",
        detectors=("engine/prefixes.py::bind", "sim/tokens.py::expected_tokens"),
        consequence="logits of the base answer for an adapter",
        outcome=Outcome.RECOMPUTE,
        owner="engine/prefixes.py",
        tests=(
            "tests/engine/test_prefixes.py::test_prompt_logprobs_look_nothing_up_and_are_cached",
            "tests/engine/test_prefixes.py::test_what_a_switch_reuses_of_four_tokens[output head]",
        ),
    ),
    Failure(
        "feasibility_readiness_collapsed",
        loop=9,
        invariant="feasible, ready, eligible, preferred and selected are five predicates",
        detectors=(
            ErrorCode.SNAPSHOT_RESIDENCY,
            ErrorCode.SNAPSHOT_GENERATION,
            ErrorCode.STALE_SLOT_GENERATION,
            "sim/checks.py::Checkers.on_plan",
        ),
        consequence="work that is cold or impossible looks executable",
        outcome=Outcome.QUEUE,
        owner="schedule/predicates.py",
        tests=(
            f"{MUTANT}[a_slot_is_published_when_its_copy_starts]",
            "tests/engine/test_lifecycle.py::test_nothing_binds_before_the_copy_event",
            "tests/schedule/test_snapshot.py::test_a_snapshot_with_one_wrong_field_is_refused",
        ),
    ),
    Failure(
        "load_starvation_hidden",
        loop=9,
        invariant="waiting for a load and waiting for service have clocks and identities of their own",
        detectors=("loraplex_starvations_total", "sim/checks.py::Checkers.on_event"),
        consequence="a cold adapter waits for ever while hot ones go on",
        outcome=Outcome.QUEUE,
        owner="engine/admission.py",
        tests=(
            "tests/sim/test_mutants.py::test_a_bound_that_is_not_kept_is_seen",
            f"{_ACCOUNTS}::test_an_adapter_that_does_not_come_starves_its_load_and_no_tenant",
            f"{MUTANT}[those_who_wait_for_a_load_are_forgotten]",
        ),
    ),
    Failure(
        "service_debited_before_commit",
        loop=9,
        invariant="service grows when results are committed, and at no other moment",
        detectors=(
            ErrorCode.SERVICE_LEDGER,
            "loraplex_service_tokens_total",
            "sim/service_books.py::ServiceBooks.on_event",
        ),
        consequence="cancelled or failed work counts as service",
        outcome=Outcome.FAIL_CLOSED,
        owner="engine/accounts.py",
        tests=(
            f"{MUTANT}[service_is_debited_when_it_is_planned]",
            f"{_ACCOUNTS}::test_failed_work_is_no_service",
            "tests/schedule/test_tenant_service.py::test_malformed_debits_are_refused_and_change_nothing",
        ),
    ),
    Failure(
        "recovery_observability_incomplete",
        loop=9,
        invariant="attempts, the age of a request, pages given back and service not debited are seen",
        detectors=(
            "loraplex_load_failures_total",
            "loraplex_adapter_transitions_total",
            "sim/checks.py::Checkers.on_event",
        ),
        consequence="retries hide latency and leak pages",
        outcome=Outcome.QUEUE,
        owner="engine/residency/load_failures.py",
        tests=(
            "tests/exact/test_residency_accounts.py::test_recovery_is_a_transaction",
            f"{MUTANT}[a_state_changes_without_its_event]",
            f"{MUTANT}[a_preemption_resets_the_arrival]",
        ),
    ),
    Failure(
        "backend_representation_normalized_away",
        loop=10,
        invariant="metadata and life cycles of the four systems of 0x0A stay four contracts",
        detectors=(),
        consequence="one system's ABI is taken for everybody's",
        outcome=Outcome.REJECT,
        owner="tools/evidence.py",
        gate=Gate.EVIDENCE,
        needs=Capability.CLAIMS,
    ),
    Failure(
        "source_claim_ceiling_exceeded",
        loop=10,
        invariant="what was read, what a paper claims, what was computed and what was not run stay apart",
        detectors=(),
        consequence="reading is presented as proof",
        outcome=Outcome.REJECT,
        owner="tools/evidence.py",
        gate=Gate.EVIDENCE,
        needs=Capability.CLAIMS,
    ),
    Failure(
        "lifecycle_parity_overclaimed",
        loop=10,
        invariant="equal outputs say nothing of publication, retirement or safety under way",
        detectors=(),
        consequence="an unsafe swap or unload is trusted",
        outcome=Outcome.REJECT,
        owner="tools/evidence.py",
        gate=Gate.EVIDENCE,
        needs=Capability.CLAIMS,
    ),
    Failure(
        "numeric_parity_called_performance_parity",
        loop=10,
        invariant="a number of latency, memory or throughput has a command, hardware and a date",
        detectors=("tools/evidence.py::faults",),
        consequence="a claim that nobody measured enters a release",
        outcome=Outcome.REJECT,
        owner="tools/evidence.py",
        tests=("tests/test_tools.py::test_a_section_without_its_origin_is_refused",),
        gate=Gate.EVIDENCE,
    ),
)
