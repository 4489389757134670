//! One config-driven decoder; families are data.
