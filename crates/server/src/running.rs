//! The generations of one HTTP request, run to their end in the request's own task.
//!
//! It knows no wire format: it yields the engine's events, or the error that ends the request. Dropping it
//! aborts what still runs, which is how a client that goes away stops its work.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use millpond_engine::llm::{Generation, GenerationEvent};

use crate::app::App;
use crate::live::LiveGuard;
use crate::openai::errors::{ApiError, ApiResult, ErrorKind};
use crate::telemetry::observer::Observer;

/// Submitted generations, one per prompt.
pub struct Running {
    app: Arc<App>,
    tracks: Vec<Track>,
    /// The track that is asked first, so that no prompt starves another.
    turn: usize,
    live: LiveGuard,
}

/// One prompt's generation.
struct Track {
    generation: Generation,
    observer: Observer,
    num_open: u32,
    ended: bool,
}

/// An event of one of the prompts.
#[derive(Debug)]
pub struct PromptEvent {
    /// Which prompt of the request, from 0.
    pub prompt: usize,
    /// What happened.
    pub event: GenerationEvent,
}

impl Running {
    /// Takes over submitted generations; `live` stays entered until the end.
    pub fn new(app: Arc<App>, live: LiveGuard, generations: Vec<Generation>) -> Self {
        live.generating(generations.iter().map(|generation| generation.id).collect());
        let track = |generation: Generation| Track {
            observer: Observer::new(&app.metrics, generation.num_choices),
            num_open: generation.num_choices,
            generation,
            ended: false,
        };
        Running {
            tracks: generations.into_iter().map(track).collect(),
            app: Arc::clone(&app),
            turn: 0,
            live,
        }
    }

    /// The next event; `None` once every choice of every prompt has come to its own end.
    pub async fn next(&mut self) -> Option<ApiResult<PromptEvent>> {
        let aborted = self.live.aborted().clone();
        if aborted.is_cancelled() {
            return Some(Err(self.interruption()));
        }
        tokio::select! {
            biased;
            event = std::future::poll_fn(|context| self.poll_next(context)) => event,
            () = aborted.cancelled() => Some(Err(self.interruption())),
        }
    }

    /// The next event if it is there already. Never waits.
    pub fn next_ready(&mut self) -> Option<Option<ApiResult<PromptEvent>>> {
        let mut context = Context::from_waker(std::task::Waker::noop());
        match pin!(self.next()).poll(&mut context) {
            Poll::Ready(event) => Some(event),
            Poll::Pending => None,
        }
    }

    fn poll_next(&mut self, context: &mut Context) -> Poll<Option<ApiResult<PromptEvent>>> {
        let (num_tracks, first) = (self.tracks.len(), self.turn);
        for step in 0..num_tracks {
            let prompt = (first + step) % num_tracks;
            let track = &mut self.tracks[prompt];
            if track.ended {
                continue;
            }
            if let Poll::Ready(event) = track.poll_event(context) {
                self.turn = prompt + 1;
                match event {
                    Some(event) => {
                        return Poll::Ready(Some(event.map(|event| PromptEvent { prompt, event })));
                    }
                    None => track.ended = true,
                }
            }
        }
        match self.tracks.iter().all(|track| track.ended) {
            true => Poll::Ready(None),
            false => Poll::Pending,
        }
    }

    fn interruption(&self) -> ApiError {
        if self.app.lifecycle.is_stopping() {
            let message = "the server shut down before the answer was complete";
            return ApiError::new(ErrorKind::ShuttingDown, message);
        }
        ApiError::new(ErrorKind::Aborted, "the request was aborted")
    }
}

impl Track {
    /// The next event of this prompt; `None` after its last choice.
    fn poll_event(&mut self, context: &mut Context) -> Poll<Option<ApiResult<GenerationEvent>>> {
        let event = match pin!(self.generation.next()).poll(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(event)) => event,
            Poll::Ready(None) if self.num_open == 0 => return Poll::Ready(None),
            Poll::Ready(None) => {
                let error = ApiError::new(ErrorKind::Engine, "the engine stopped");
                return Poll::Ready(Some(Err(error)));
            }
        };
        self.observer.observe(&event);
        Poll::Ready(Some(self.note_end(event)))
    }

    /// A choice that did not come to its own end ends the request with an error.
    fn note_end(&mut self, event: GenerationEvent) -> ApiResult<GenerationEvent> {
        match &event {
            GenerationEvent::PromptLogprobs(_) | GenerationEvent::Delta(_) => Ok(event),
            GenerationEvent::Finished { reason, .. } => {
                self.num_open = self.num_open.saturating_sub(1);
                match ApiError::of_finish(reason) {
                    Some(error) => Err(error),
                    None => Ok(event),
                }
            }
        }
    }
}
