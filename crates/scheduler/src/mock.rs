//! A pure `ModelRunner` over integer slots: oracle and scripted modes, switchable faults.
