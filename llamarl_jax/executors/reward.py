"""The reward executor: scores completion groups as they come and hands them on, or gives their place back."""

from __future__ import annotations

from collections.abc import Callable

from llamarl_jax.channels import Channel
from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.metrics.counters import Counters
from llamarl_jax.metrics.timeline import Timeline
from llamarl_jax.rewards.scoring import RewardScorer
from llamarl_jax.schedule import SharedSchedule
from llamarl_jax.types import CompletionGroup, DroppedGroup, TrajectoryGroup


class Reward:
    """One executor on the host; its workers are other processes."""

    def __init__(
        self,
        *,
        scorer: RewardScorer,
        schedule: SharedSchedule,
        cursor: PromptCursor,
        completions: Channel[CompletionGroup],
        trajectories: Channel[TrajectoryGroup],
        timeline: Timeline,
        counters: Counters,
        heartbeat: Callable[[], None],
    ) -> None:
        self._scorer, self._schedule, self._cursor = scorer, schedule, cursor
        self._completions, self._trajectories = completions, trajectories
        self._timeline, self._counters, self._heartbeat = timeline, counters, heartbeat

    def run(self) -> None:
        """Scores groups until the schedule needs no more."""
        while not self._schedule.is_exhausted:
            with self._timeline.wait("reward", "completions"):
                groups = [self._completions.get()]
            groups += self._completions.drain()
            with self._timeline.span("reward", "score"):
                results = self._scorer.score_groups(groups)
            for result in results:
                self._hand_on(result)
            self._heartbeat()

    def _hand_on(self, result: TrajectoryGroup | DroppedGroup) -> None:
        """Tells the schedule first: whoever receives the group may rely on its being completed."""
        if isinstance(result, TrajectoryGroup):
            rewards = [trajectory.reward for trajectory in result.trajectories]
            self._counters.add(reward=sum(rewards), scored=len(rewards), failed=result.num_excluded)
            self._schedule.complete(result.admission_index)
            with self._timeline.wait("reward", "trajectory queue"):
                self._trajectories.put(result)
        else:
            self._counters.add(dropped_groups=1, failed=result.num_excluded)
            self._cursor.settle(result.admission_index)
            self._schedule.drop(result.admission_index)
