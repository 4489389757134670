//! The engine thread: drain the inbox, schedule, execute, commit, publish.
