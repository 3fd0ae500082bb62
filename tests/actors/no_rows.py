"""An empty share of rows."""

from rlsys.controller.worker_protocols import StepRowsRef

NO_ROWS = StepRowsRef(cells={}, scalars={}, group_ids=(), group_sizes=(), group_num_tokens=())
