"""From outcomes of rounds to what a run leaves: a line of log, a row of metrics.jsonl, and the summary."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from pina_flwr.privacy.cohort import planned_rounds
from pina_flwr.privacy.guarantee import Bound, Subject, caveats, epsilon_so_far, guarantee
from pina_flwr.report.metrics_log import MetricsLog, RoundRow
from pina_flwr.report.summary import Epsilons, NoiseMultipliers, Summary, known_as
from pina_flwr.strategies.clustered import Outcome

log = logging.getLogger("flwr")
RECENT = 5  # rounds whose mean duration predicts the time left


class Recorder:
    """Collects the rows of a run. Budget counts as spent once a round was tried, dropped or not."""

    def __init__(self, subject: Subject, folder: Path):
        self.subject = subject
        self.config, self.plan, self.users = subject.config, subject.noise, subject.users
        self.rows: list[RoundRow] = []
        self._file = MetricsLog(folder)
        self._rounds = 0

    def announce(self, rounds: int) -> None:
        """Say what is about to run."""
        self._rounds = rounds
        c, cohort = self.config, self.config.sampling_rate * self.users
        log.info("%s on %s with %s: %d users, %.0f a round, %d rounds", c.strategy, c.dataset, c.backbone,
                 self.users, cohort, rounds)  # fmt: skip
        if c.private:
            log.info("noise multiplier z = %.4g, %.4g in stages 1, 2", self.plan.stage1, self.plan.stage2)

    def note(self, outcome: Outcome) -> None:
        """Record one round."""
        row = self._row(outcome)
        self.rows.append(row)
        self._file.append(row)
        log.info("%s", self._line(row))

    def _row(self, o: Outcome) -> RoundRow:
        d = o.diagnosis
        measured = {} if d is None else {
            "loss": _or_none(d.loss),
            "accuracy": _or_none(d.accuracy),
            "worst_cluster_accuracy": _or_none(d.worst_cluster_accuracy),
            "cluster_accuracy": [_or_none(a) for a in d.cluster_accuracy],
            "clustering_accuracy": _or_none(d.clustering_accuracy),
            "ari": _or_none(d.ari),
            "cluster_sizes": d.cluster_sizes,
            "update_norm_mean": _or_none(d.norm_mean),
            "update_norm_max": _or_none(d.norm_max),
            "left_out": d.left_out,
        }  # fmt: skip
        return RoundRow(
            round=o.round,
            rounds=self._rounds,
            stage=o.stage,
            weights=list(o.weights) or None,
            noise_std=o.noise_std,
            epsilon=self._epsilon_after(o.round),
            bytes_up=o.bytes_up,
            bytes_down=o.bytes_down,
            seconds=o.seconds,
            cohort=o.cohort,
            dropped=o.dropped or None,
            survivors=o.survivors,
            refusals=dict(o.refusals) or None,
            lost=dict(o.lost) or None,
            ignored=o.ignored,
            **measured,  # type: ignore[arg-type]
        )

    def _epsilon_after(self, round_: int) -> float | None:
        stage1, _ = planned_rounds(self.config)
        done1 = min(round_, stage1)
        return _or_none(epsilon_so_far(self.subject, done1, round_ - done1))

    def _line(self, row: RoundRow) -> str:
        parts = [f"round {row.round}/{row.rounds}", f"stage {row.stage}", f"cohort {row.cohort}"]
        if row.dropped:
            parts.append(f"DROPPED: {row.dropped}")
        if row.refusals and not row.dropped:
            parts.append("refused: " + ", ".join(f"{why} ({n})" for why, n in row.refusals.items()))
        if row.survivors is not None and row.survivors < (row.cohort or 0) and not row.dropped:
            phases = ", ".join(f"{n} in {phase}" for phase, n in (row.lost or {}).items())
            parts.append(f"{(row.cohort or 0) - row.survivors} vanished" + (f" ({phases})" if phases else ""))
        if row.left_out:
            parts.append(f"left out, update not finite: {row.left_out}")
        if row.loss is not None:
            parts.append(f"loss {row.loss:.3f}")
        if row.accuracy is not None:
            parts.append(f"accuracy {row.accuracy:.3f}")
        if row.clustering_accuracy is not None:
            parts.append(f"clustering {row.clustering_accuracy:.2f}")
        recent = [r.seconds or 0.0 for r in self.rows[-RECENT:]]
        left = (row.rounds - row.round) * sum(recent) / max(1, len(recent))
        return " · ".join([*parts, f"{row.seconds:.1f} s", f"{left:.0f} s left"])

    def summary(self, seconds: float, clusters: int) -> Summary:
        """The run's summary, after its last round."""
        c, held = self.config, guarantee(self.subject)
        unmeasured = RoundRow(round=0, rounds=0, stage=0)
        last = next((row for row in reversed(self.rows) if row.accuracy is not None), unmeasured)
        return Summary(
            strategy=c.strategy,
            accuracy=last.accuracy,
            worst_cluster_accuracy=last.worst_cluster_accuracy,
            clustering_accuracy=last.clustering_accuracy,
            ari=last.ari,
            rounds=len(self.rows),
            seconds=seconds,
            epsilon=Epsilons(
                recipient=_or_none(held.recipient.epsilon),
                server=_or_none(held.server.epsilon),
                sketch=0.0 if held.sketch is None else _or_none(held.sketch.epsilon),
            ),
            delta=self.plan.delta,
            noise_cohort_size=c.simulated_cohort,
            cohort=c.sampling_rate * self.users,
            users=self.users,
            seed=c.seed,
            dataset=known_as(c.dataset),
            backbone=known_as(c.backbone),
            clusters=clusters,
            groups=None if c.user_column else c.rotations,
            noise_multiplier=NoiseMultipliers(stage1=self.plan.stage1, stage2=self.plan.stage2),
            caveats=caveats(self.subject),
            epsilon_as_paper_counts=_paper_counts(held.recipient, held.server, held.sketch),
            dropped_rounds=sum(row.dropped is not None for row in self.rows),
            trained=any(row.stage == 2 and row.dropped is None for row in self.rows),
            in_the_clear=c.traits.in_the_clear,
            local_updates=c.local_updates,
            test_on=c.test_on,
        )


def _paper_counts(recipient: Bound, server: Bound, sketch: Bound | None) -> dict[str, float | None] | None:
    if recipient.as_paper_counts == recipient.epsilon:
        return None
    return {
        "recipient": _or_none(recipient.as_paper_counts),
        "server": _or_none(server.as_paper_counts),
        "sketch": None if sketch is None else _or_none(sketch.as_paper_counts),
    }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
