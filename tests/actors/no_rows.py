"""A rank's share of nothing."""

from rlsys.controller.worker_protocols import Rows

NO_ROWS = Rows(cells={}, scalars={}, group_ids=(), group_sizes=(), group_num_tokens=())
