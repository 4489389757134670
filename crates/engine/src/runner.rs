//! Executes batch plans with the decoder and the sampler.
