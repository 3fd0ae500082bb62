"""A rank's share of nothing."""

from rlsys.controller.worker_protocols import StepRowsRef

NO_ROWS = StepRowsRef(cells={}, scalars={}, group_ids=(), group_sizes=(), group_num_tokens=())
