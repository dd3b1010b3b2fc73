"""Who waits for whom: users, long prompts and short ones."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.test_scheduler import Replica, limits, request


def service(replica: Replica) -> Counter[str]:
    """What each user has had: prompt tokens computed once, tokens of answers twice."""
    had: Counter[str] = Counter()
    for id, asked in replica.asked.items():
        tokens = len(replica.tokens[id])
        if tokens:
            had[asked.user] += len(asked.tokens) + 2 * tokens
    return had


@given(st.integers(1, 3), st.integers(4, 30), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=10)
def test_users_who_both_want_more_get_the_same(depth: int, long: int, new: int, rows: int) -> None:
    replica = Replica(
        limits(depth=depth, max_num_seqs=rows, num_blocks=200, prefix_cache=False, max_queue=500)
    )
    # One sends many large requests, the other small ones in the same number of tokens or more.
    for k in range(40):
        replica.add(request(f"a{k}", [1] * long, new=new, user="a"))
    for k in range(160):
        replica.add(request(f"b{k}", [2] * 3, new=2, user="b"))
    # Sheng et al. 2024, theorem 4.4: twice the larger of one prompt and all that runs at once.
    bound = 2 * (long + 2 * new) * rows + 2 * long
    for _ in range(400):
        waiting = {one.request.user for one in replica.scheduler._by_id.values() if one.state == 0}
        if waiting != {"a", "b"}:
            break
        had = service(replica)
        assert abs(had["a"] - had["b"]) <= bound
        replica.step()
    replica.run()


def test_a_newcomer_does_not_wait_behind_a_flood() -> None:
    replica = Replica(limits(max_num_seqs=2, num_blocks=200, max_queue=500))
    for k in range(100):
        replica.add(request(f"a{k}", [1, k % 90], user="a"))
    for _ in range(20):
        replica.step()
    replica.add(request("b", [3, 4], user="b"))
    before = len(replica.ended)
    while "b" not in replica.ended:
        replica.step()
    assert len(replica.ended) - before <= 5


def test_idleness_is_not_saved_up() -> None:
    replica = Replica(limits(max_num_seqs=1, num_blocks=200, max_queue=500))
    replica.add(request("b0", [1], user="b", new=1))
    for k in range(60):
        replica.add(request(f"a{k}", [1, 2], user="a"))
    for _ in range(120):
        replica.step()
    done = len(replica.ended)
    for k in range(20):
        replica.add(request(f"b{k + 1}", [1, 2], user="b"))
    for _ in range(60):
        replica.step()
    ended = list(replica.ended)[done:]
    assert abs(sum(id[0] == "a" for id in ended) - sum(id[0] == "b" for id in ended)) <= 2


def test_who_sends_one_after_the_other_is_not_always_new() -> None:
    replica = Replica(limits(max_num_seqs=1, num_blocks=200, max_queue=500))
    for k in range(30):
        replica.add(request(f"a{k}", [1, 2], user="a", new=4))
    for k in range(30):
        replica.add(request(f"c{k}", [1, 2], user="c", new=4))
    sent = 0
    replica.add(request("b0", [1, 2], user="b", new=4))
    for _ in range(300):
        replica.step()
        if f"b{sent}" in replica.ended:
            sent += 1
            replica.add(request(f"b{sent}", [1, 2], user="b", new=4))
        if len(replica.ended) >= 45:
            break
    counts = Counter(id[0] for id in replica.ended)
    assert max(counts.values()) - min(counts.values()) <= 3


def test_within_a_user_first_come_is_first_served() -> None:
    replica = Replica(limits(max_num_seqs=1, num_blocks=200))
    replica.add(*(request(f"r{k}", [k, 1, 2]) for k in range(12)))
    replica.run()
    assert list(replica.ended) == [f"r{k}" for k in range(12)]


def test_short_prompts_pass_a_long_one() -> None:
    replica = Replica(
        limits(num_blocks=500, max_num_batched_tokens=32, max_model_len=2000, max_num_seqs=16)
    )
    replica.add(request("long", [k % 90 for k in range(1500)]))
    replica.step()
    for k in range(10):
        replica.add(request(f"s{k}", [91, k, 5, 6], new=1))
    for _ in range(6):
        replica.step()
    assert {f"s{k}" for k in range(10)} <= set(replica.ended)
    chunks = [row.count for plan in replica.plans for row in plan.rows if row.slot == 0]
    assert min(chunks) >= 12  # half of what decoding leaves
    replica.run()


def test_short_prompts_do_not_hold_up_a_long_one() -> None:
    for users in ("a", "ab"):
        replica = Replica(
            limits(num_blocks=500, max_num_batched_tokens=32, max_model_len=2000, max_num_seqs=16)
        )
        replica.add(request("long", [k % 90 for k in range(640)], user=users[0]))
        steps = 0
        while not replica.tokens["long"]:
            for k in range(4):
                replica.add(request(f"s{steps}.{k}", [steps % 90, k, *range(10)], new=1,
                                    user=users[-1]))  # fmt: skip
            replica.step()
            steps += 1
        assert steps <= 3 * 640 // 32 + 8


def test_long_prompts_are_not_started_side_by_side_before_their_turn() -> None:
    replica = Replica(
        limits(num_blocks=900, max_num_batched_tokens=32, max_model_len=2000, max_num_seqs=8)
    )
    replica.add(*(request(f"r{k}", [k] * 300, new=1, user="a") for k in range(8)))
    for _ in range(4):
        replica.step()
    assert replica.scheduler.stats().running <= 2
    replica.add(request("b", [9] * 300, new=1, user="b"))
    replica.run()
    assert list(replica.ended).index("b") <= 2


def test_a_large_request_is_not_passed_for_ever_by_those_that_fit() -> None:
    replica = Replica(limits(num_blocks=40, max_num_batched_tokens=64, max_num_seqs=6))
    for k in range(5):
        replica.add(request(f"s{k}", [k] * 12, new=20))
    for _ in range(3):
        replica.step()
    replica.add(request("large", [9] * 100, new=8))
    for k in range(30):
        replica.add(request(f"t{k}", [k] * 12, new=20))
    replica.run()
    assert list(replica.ended).index("large") <= 5 + 6
