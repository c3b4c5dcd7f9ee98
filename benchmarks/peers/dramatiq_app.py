"""Dramatiq on RabbitMQ, with confirms, as taskq publishes."""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from benchmarks import tally

QUEUE = os.environ["BENCH_QUEUE"]
dramatiq.set_broker(RabbitmqBroker(url=os.environ["BENCH_URL"], confirm_delivery=True))


@dramatiq.actor(queue_name=QUEUE, actor_name="noop")
def noop(number: int, text: str) -> None:
    tally.done()


@dramatiq.actor(queue_name=QUEUE, actor_name="stamp")
def stamp(called: int) -> None:
    tally.waited(called)


def one(number: int, text: str) -> None:
    noop.send(number, text)


def late(called: int) -> None:
    stamp.send(called)
