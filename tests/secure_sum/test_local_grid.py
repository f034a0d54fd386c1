"""The network in one process: what it does as Flower does."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from pina_flwr.secure_sum.local_grid import LocalGrid, as_task, over_the_wire


def counting() -> ClientApp:
    """Answers with how often it was asked on this node, and by whom."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        record = context.state.config_records.get("asked", ConfigRecord({"times": 0}))
        times = int(record["times"]) + 1  # type: ignore[arg-type]
        context.state["asked"] = ConfigRecord({"times": times, "ids": [context.node_id] * times})
        content = ConfigRecord({"times": times, "node": context.node_id, **context.node_config})
        return Message(RecordDict({"answer": content}), reply_to=message)

    @app.train("fail")
    def fail(message: Message, context: Context) -> Message:
        context.state["asked"] = ConfigRecord({"times": 10})
        raise RuntimeError("no memory")

    return app


def ask(grid: LocalGrid, nodes: Iterable[int], kind: str = "train") -> list[Message]:
    """One message to each node."""
    messages = [Message(RecordDict(), message_type=kind, dst_node_id=node) for node in nodes]
    return grid.send_and_receive(messages, timeout=1.0)


def answers(replies: list[Message]) -> list[dict]:
    return [dict(reply.content.config_records["answer"]) for reply in replies]


class TestNodes:
    def test_have_ids_and_partitions(self) -> None:
        grid = LocalGrid(counting(), nodes=3)
        assert grid.get_node_ids() == [0, 1, 2]
        expected = [
            {"times": 1, "node": node, "partition-id": node, "num-partitions": 3} for node in range(3)
        ]
        assert answers(ask(grid, range(3))) == expected

    def test_reply_to_who_asked(self) -> None:
        (reply,) = ask(LocalGrid(counting(), nodes=3), [2])
        assert (reply.metadata.src_node_id, reply.metadata.dst_node_id) == (2, 1)
        assert reply.metadata.message_type == "train"

    def test_keep_their_state_to_themselves(self) -> None:
        grid = LocalGrid(counting(), nodes=2)
        ask(grid, [0, 0, 1])
        assert [answer["times"] for answer in answers(ask(grid, [0, 1]))] == [3, 2]
        assert grid.contexts[1].state.config_records["asked"]["ids"] == [1, 1]

    def test_meet_their_state_as_a_new_process_would(self) -> None:
        """No object is the same as before, so what does not survive the wire format is noticed."""
        seen: list[ArrayRecord] = []
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            if "numbers" not in context.state:
                context.state["numbers"] = ArrayRecord([np.arange(3)])
            seen.append(context.state.array_records["numbers"])
            return Message(RecordDict(), reply_to=message)

        ask(LocalGrid(app, nodes=1), [0, 0])
        first, second = seen
        assert first is not second
        assert second["0"].numpy().tolist() == [0, 1, 2]

    def test_that_raise_answer_with_an_error(self) -> None:
        grid = LocalGrid(counting(), nodes=2)
        failed, fine = *ask(grid, [0], "train.fail"), *ask(grid, [1])
        assert failed.has_error()
        assert failed.error.code == 2
        assert failed.error.reason == "RuntimeError: no memory"
        assert failed.metadata.src_node_id == 0
        assert not fine.has_error()

    def test_that_are_none_answer_with_an_error(self) -> None:
        (reply,) = ask(LocalGrid(counting(), nodes=2), [7])
        assert reply.has_error()


class TestNetwork:
    @pytest.mark.parametrize("copies", [0, 1, 3])
    def test_loses_or_repeats(self, copies: int) -> None:
        grid = LocalGrid(counting(), 2, lambda request, reply: [reply] * copies)
        assert len(ask(grid, [0, 1])) == 2 * copies

    def test_sees_requests_and_replies(self) -> None:
        seen = []

        def network(request: Message, reply: Message) -> list[Message]:
            seen.append((request.metadata.dst_node_id, reply.metadata.src_node_id))
            return [reply] if request.metadata.dst_node_id else []

        replies = ask(LocalGrid(counting(), 2, network), [0, 1])
        assert seen == [(0, 0), (1, 1)]
        assert [reply.metadata.src_node_id for reply in replies] == [1]

    def test_copies(self) -> None:
        """What a node does to its message does not reach the server's."""
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            message.content.config_records["record"]["number"] = 2
            return Message(message.content, reply_to=message)

        request = Message(
            RecordDict({"record": ConfigRecord({"number": 1})}), message_type="train", dst_node_id=0
        )
        (reply,) = LocalGrid(app, nodes=1).send_and_receive([request])
        assert request.content.config_records["record"]["number"] == 1
        assert reply.content.config_records["record"]["number"] == 2

    def test_of_an_error(self) -> None:
        (reply,) = ask(LocalGrid(counting(), nodes=1), [0], "train.fail")
        assert over_the_wire(reply).error.reason == reply.error.reason


class TestTask:
    def test_is_set_and_taken_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a task Flower makes no message."""
        for name in ("_task_id", "_run_id", "_node_id"):
            monkeypatch.setattr(TaskIdentity, name, None)
        with pytest.raises(RuntimeError):
            Message(RecordDict(), message_type="train", dst_node_id=0)
        with as_task():
            assert answers(ask(LocalGrid(counting(), nodes=1), [0]))[0]["times"] == 1
        assert TaskIdentity._run_id is None

    def test_is_taken_back_after_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TaskIdentity, "_node_id", 5)
        with pytest.raises(ZeroDivisionError), as_task():
            raise ZeroDivisionError
        assert TaskIdentity._node_id == 5
