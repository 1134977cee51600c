"""The mistakes of Jobs: how many pods start, what starts again and what does not, the time they have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.errors import Exit
from shardwise.launch.mistakes.manifest_view import Manifest, containers, mappings, words_of
from shardwise.launch.mistakes.mistake import Mistake
from shardwise.launch.spec import LaunchSpec

AGAIN = {int(Exit.STOPPED), int(Exit.HARDWARE)}
NEVER_AGAIN = {int(code) for code in (Exit.USER_MISTAKE, Exit.OUT_OF_MEMORY, Exit.DIVERGED, Exit.BUG)}
DEFAULT_GRACE_S = 30


def _codes(rule: dict[str, Any], asked: set[int]) -> set[int]:
    """Returns those of the exit codes that a rule is about."""
    on = rule.get("onExitCodes")
    if not isinstance(on, dict) or not isinstance(on.get("values"), list):
        return set()
    named = {code for code in on["values"] if isinstance(code, int)}
    return asked - named if on.get("operator") == "NotIn" else asked & named


def not_all_at_once(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path in manifest.jobs:
        count, parallel = tree.at(*path, "completions"), tree.at(*path, "parallelism")
        if isinstance(count, int) and count > 1 and parallel != count:
            yield Mistake(
                tree.line(*path, "parallelism"),
                f"{parallel or 1} of {count} pods run at a time",
                "ranks wait for each other: the first pods wait for ever for those that are not started",
                f"parallelism: {count}",
            )
        if isinstance(count, int) and count > 1 and tree.at(*path, "completionMode") != "Indexed":
            yield Mistake(
                tree.line(*path, "completionMode"),
                "pods have no number: completionMode is not Indexed",
                "without JOB_COMPLETION_INDEX no pod knows which node it is",
                "completionMode: Indexed",
            )
        if plan and isinstance(count, int) and count != plan.nodes:
            yield Mistake(
                tree.line(*path, "completions"),
                f"completions: {count}",
                plan.why["nodes"],
                f"completions: {plan.nodes}",
            )


def failures(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    only_checks = any("--preflight" in words_of(container) for _, _, container in containers(manifest))
    for tree, path in manifest.jobs:
        if tree.at(*path, "backoffLimit") == 0 and not only_checks:
            yield Mistake(
                tree.line(*path, "backoffLimit"),
                "backoffLimit: 0 gives up at the first fault",
                "one lost machine ends the training",
                f"backoffLimit: {5 * (plan.nodes if plan else 4)}, with a podFailurePolicy for mistakes",
            )
        rules = tree.at(*path, "podFailurePolicy", "rules")
        if not isinstance(rules, list) or not rules:
            yield Mistake(
                tree.line(*path),
                "no podFailurePolicy",
                "a mistake in the config is tried again and again, and a drained machine counts as a failure",
                "FailJob on 2, 3, 4 and 6, Ignore on 75, Count on 5",
            )
            continue
        for number, rule in enumerate(mappings(rules)):
            codes = _codes(rule, AGAIN | NEVER_AGAIN)
            if rule.get("action") == "FailJob" and codes & AGAIN:
                yield Mistake(
                    tree.line(*path, "podFailurePolicy", "rules", number),
                    f"exit code {', '.join(map(str, sorted(codes & AGAIN)))} fails the job",
                    "75 is stopped on purpose with its work saved, 5 is hardware or network: both go on",
                    "take them out of this rule",
                )
            if rule.get("action") == "Ignore" and codes & NEVER_AGAIN:
                yield Mistake(
                    tree.line(*path, "podFailurePolicy", "rules", number),
                    f"exit code {', '.join(map(str, sorted(codes & NEVER_AGAIN)))} starts again for ever",
                    "a config, memory or a loss that failed once fails again",
                    "action: FailJob",
                )


def restarts_in_place(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path in manifest.jobs:
        if tree.at(*path, "template", "spec", "restartPolicy") != "Never":
            yield Mistake(
                tree.line(*path, "template", "spec", "restartPolicy"),
                "restartPolicy is not Never",
                "the pod starts again in place, whatever its exit code is, and podFailurePolicy is not asked",
                "restartPolicy: Never",
            )


def too_little_time(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path in manifest.pods:
        grace = tree.at(*path, "terminationGracePeriodSeconds")
        needed = plan.grace_s if plan else DEFAULT_GRACE_S + 1
        if (grace if isinstance(grace, int) else DEFAULT_GRACE_S) < needed:
            yield Mistake(
                tree.line(*path, "terminationGracePeriodSeconds"),
                f"pods are killed {grace or DEFAULT_GRACE_S} s after they are told to end",
                plan.why["grace"] if plan else "a step has to end and its state has to be written in that time",
                f"terminationGracePeriodSeconds: {plan.grace_s if plan else 300}",
            )
    for tree, path in manifest.jobs:
        limit = tree.at(*path, "activeDeadlineSeconds")
        if plan and isinstance(limit, int) and limit < plan.seconds:
            yield Mistake(
                tree.line(*path, "activeDeadlineSeconds"),
                f"the job fails after {limit} s",
                f"the training may take {plan.seconds} s: {plan.why['time']}",
                f"activeDeadlineSeconds: {plan.seconds}, or none",
            )
