"""This is the training loop. Read `train` top to bottom: it is the program.

One rank's view of a run; every rank executes this file. What it asks for is in trainer.py, who hears of it in
listener.py, what is there before the first step in setup.py. Ranks decide nothing alone: stopping and checkpointing are
agreed on at every step (agreement.py).
"""

from __future__ import annotations

from contextlib import ExitStack

from shardwise.errors import Exit
from shardwise.run.guards import StopRequests
from shardwise.run.listener import Listener
from shardwise.run.planner import Planner
from shardwise.run.session import Session
from shardwise.run.setup import Setup
from shardwise.run.trainer import Trainer


def train(session: Session, stops: StopRequests, planner: Planner, listener: Listener) -> Exit:
    """Collective. Trains and returns DONE when all steps are made; else why they are not: STOPPED, INTERRUPTED or
    DIVERGED."""
    heartbeat = session.heartbeat
    heartbeat.enter("set-up")
    with ExitStack() as opened:  # whatever happens, threads end and files are closed
        setup = Setup(session, planner, listener, opened)
        listener.started(setup)
        trainer = Trainer(setup, stops)

        for step in trainer.steps():
            heartbeat.step(step)
            trainer.start(step)
            listener.step_started(step)
            for finished in trainer.results_due(step):
                listener.step(finished)
            listener.found(*trainer.take_found())
            if trainer.way_back:
                with heartbeat.during("going back"):
                    listener.went_back(trainer.go_back())
                continue
            if trainer.evaluates(step):
                with heartbeat.during("evaluating"):
                    listener.evaluated(step, trainer.evaluate(), trainer.own_evaluation())
            if trainer.samples(step):
                with heartbeat.during("sampling"):
                    listener.sampled(trainer.sample())
            trainer.restart_clock()
            if trainer.saves(step):
                with heartbeat.during("saving"):
                    trainer.save(step)
            for saved in trainer.committed():
                listener.saved(saved)

        heartbeat.enter("saving")
        if trainer.commits():
            trainer.save(trainer.last, wait=True)
        trainer.finish_saving()
        for saved in trainer.committed():
            listener.saved(saved)
        heartbeat.enter("ending")
        if setup.fills_bubbles:
            listener.filled(trainer.last, setup.filler.result() if setup.filler else None)
        ending = trainer.ending()
        if ending.code:
            listener.stopped(ending)
        else:
            listener.evaluated(ending.step, trainer.evaluate(), trainer.own_evaluation())
            listener.sampled(trainer.sample())
            listener.finished(ending)
        return ending.code
