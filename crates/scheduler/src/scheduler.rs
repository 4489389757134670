//! The state machine: add, fork, abort, schedule, commit, next_deadline.
