"""Our side: one function per variant, each returning the step that the benchmark times. TO BE FILLED IN.

The contract, the same as for the peers:
- build from `setting` alone: `setting.spec` with the weights of `initialize(model, setting.seed)`, AdamW and clipping with
  the setting's numbers, `setting.micro_batches` micro-batches per step, fp32. The gloo process group exists already, and
  torch's thread count is set;
- the returned step takes this rank's micro-batches (lists of (tokens_BT, targets_BT), all targets count) and does all that
  our trainer does in one step;
- it returns `Done(loss, norm)`: the loss of this rank or of all, and the norm of the whole gradient before clipping.
Losses and norms of the first steps are compared with a single process; a variant that differs is not timed.
"""

from __future__ import annotations

from peers.setting import Setting, Step


class NotWired(Exception):
    """This variant waits for its few lines below."""


def ours_ddp(setting: Setting) -> Step:
    raise NotWired("ours_ddp")


def ours_zero1(setting: Setting) -> Step:
    raise NotWired("ours_zero1")


def ours_zero2(setting: Setting) -> Step:
    raise NotWired("ours_zero2")


def ours_zero3(setting: Setting) -> Step:
    raise NotWired("ours_zero3")
