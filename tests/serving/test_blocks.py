"""The pool of blocks and the digests that blocks are found by."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hocket.serving.scheduling.blocks import BlockPool
from hocket.serving.scheduling.prefix import Digests


class Pools(RuleBasedStateMachine):
    """Against a pool that keeps plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.order: list[int] = []

    @precondition(lambda self: self.pool.free)
    @rule()
    def take(self) -> None:
        block = self.pool.take()
        assert all(block not in table for table in self.held)
        if block in self.order:
            others = set(range(6)) - {b for t in self.held for b in t} - set(self.order)
            assert not others, "clean blocks go first"
            assert self.order[0] == block, "then the one that was kept longest"
            self.order.remove(block)
        self.content.pop(block, None)
        self.held.append([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c"]))
    def name(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(self.held))[0]
        self.pool.name(block, name)
        if block not in self.content and name not in self.content.values():
            self.content[block] = name

    @rule(name=st.sampled_from([b"a", b"b", b"c"]))
    def share(self, name: bytes) -> None:
        block = self.pool.find(name)
        assert block == next((b for b, held in self.content.items() if held == name), None)
        if block is not None:
            assert self.pool.is_held(block) == any(block in table for table in self.held)
            self.pool.share(block)
            self.held.append([block])
            if block in self.order:
                self.order.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        table = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.give_back(table)
        if table[0] in self.content and not any(table[0] in other for other in self.held):
            self.order.append(table[0])

    @invariant()
    def counts(self) -> None:
        held = {block for table in self.held for block in table}
        assert self.pool.used == len(held)
        assert self.pool.free == 6 - len(held)
        assert self.pool.kept == len(self.order)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=40, stateful_step_count=30)


def test_a_block_is_not_given_back_twice() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.give_back([block])
    with pytest.raises(AssertionError, match="given back too often"):
        pool.give_back([block])


def test_digests_name_everything_before_them() -> None:
    digests = Digests(2, b"secret")

    def chain(tokens: list[int], salt: str = "") -> list[bytes]:
        found = [digests.root(salt)]
        digests.extend(found, array("i", tokens), len(tokens) // 2)
        return found[1:]

    one = chain([1, 2, 3, 4, 5])
    assert len(one) == 2
    assert chain([1, 2, 3, 4]) == one
    assert chain([1, 2, 3, 5])[0] == one[0]
    assert chain([1, 2, 3, 5])[1] != one[1]
    assert chain([0, 2, 3, 4])[1] != one[1]
    assert not set(chain([1, 2, 3, 4], "salt")) & set(one)
    assert Digests(2).root("") != Digests(2).root(""), "secrets are drawn"
    parts = [digests.root("")]
    for count in (1, 1, 2):
        digests.extend(parts, array("i", [1, 2, 3, 4]), count)
    assert parts[1:] == one
