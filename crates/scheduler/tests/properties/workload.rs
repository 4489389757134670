//! What clients ask for, as small data that proptest can draw and shrink, and how it becomes a `Request`.

use std::num::NonZeroU32;
use std::sync::Arc;

use millpond_scheduler::{
    CacheSalt, Deadlines, Request, RequestId, SamplingParams, Span, StopConditions, Timestamp,
    TokenId,
};
use proptest::prelude::*;

/// Small, so that prompts agree by chance and outputs meet their stop tokens.
pub const VOCABULARY: NonZeroU32 = NonZeroU32::new(48).expect("48 is not zero");

/// Ends every output that does not ignore it.
pub const END_OF_SEQUENCE: TokenId = TokenId(0);

/// One client's ask. Prompts of one family share their beginnings.
#[derive(Clone, Debug)]
pub struct Ask {
    pub prompt: Prompt,
    pub stop: Stop,
    pub num_choices: u32,
    pub priority: i32,
    pub salt: u8,
    pub seed: u64,
    pub prompt_logprobs: bool,
    pub patience: Patience,
}

/// `shared` tokens of the family's text, then `own` tokens of a tail's.
#[derive(Clone, Copy, Debug)]
pub struct Prompt {
    pub family: u8,
    pub shared: u32,
    pub tail: u8,
    pub own: u32,
}

/// When the output ends.
#[derive(Clone, Copy, Debug)]
pub struct Stop {
    pub max_tokens: u32,
    pub min_tokens: u32,
    pub token: Option<u32>,
    pub ignore_eos: bool,
}

/// Milliseconds after arrival at which a client gives up.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patience {
    pub queue: Option<u32>,
    pub first_token: Option<u32>,
    pub total: Option<u32>,
}

impl Ask {
    /// The plainest ask: a prompt of its own, greedy, `max_tokens` tokens whatever they are.
    pub fn plain(tail: u8, num_prompt_tokens: u32, max_tokens: u32) -> Self {
        Ask {
            prompt: Prompt {
                family: 0,
                shared: 0,
                tail,
                own: num_prompt_tokens,
            },
            stop: Stop {
                max_tokens,
                min_tokens: 0,
                token: None,
                ignore_eos: true,
            },
            num_choices: 1,
            priority: 0,
            salt: 0,
            seed: 0,
            prompt_logprobs: false,
            patience: Patience::default(),
        }
    }

    /// The request it makes of the scheduler when it arrives.
    pub fn request(&self, id: u64, arrival: Timestamp) -> Request {
        let prompt = self.prompt.tokens();
        self.request_with_prompt(prompt, id, arrival)
    }

    /// The same with another prompt, such as a conversation so far.
    pub fn request_with_prompt(
        &self,
        prompt: Vec<TokenId>,
        id: u64,
        arrival: Timestamp,
    ) -> Request {
        Request {
            id: RequestId(id),
            prompt: prompt.into(),
            sampling: SamplingParams {
                seed: self.seed,
                prompt_logprobs: self.prompt_logprobs.then_some(0),
                ..SamplingParams::default()
            },
            stop: self.stop.conditions(),
            num_choices: self.num_choices,
            priority: self.priority,
            salt: salt(self.salt),
            arrival,
            deadlines: self.patience.deadlines(arrival),
        }
    }
}

impl Prompt {
    /// Its tokens; at least one.
    pub fn tokens(&self) -> Vec<TokenId> {
        let shared = (0..self.shared).map(|at| text(u64::from(self.family), at));
        let own = (0..self.own.max(1)).map(|at| text(1000 + u64::from(self.tail), at));
        shared.chain(own).collect()
    }
}

impl Stop {
    fn conditions(&self) -> StopConditions {
        StopConditions {
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            stop_token_ids: self.token.map(TokenId).into_iter().collect(),
            eos_token_ids: vec![END_OF_SEQUENCE],
            ignore_eos: self.ignore_eos,
        }
    }
}

impl Patience {
    fn deadlines(&self, arrival: Timestamp) -> Deadlines {
        let after =
            |millis: Option<u32>| millis.map(|ms| arrival + Span::from_millis(u64::from(ms)));
        Deadlines {
            queue: after(self.queue),
            first_token: after(self.first_token),
            total: after(self.total),
        }
    }
}

fn salt(number: u8) -> CacheSalt {
    match number {
        0 => CacheSalt::default(),
        tenant => CacheSalt(Arc::from([tenant])),
    }
}

/// The `at`-th token of a text that never ends: a linear congruential generator's high bits.
fn text(which: u64, at: u32) -> TokenId {
    let mut state = which.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ u64::from(at);
    for _ in 0..3 {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        state ^= state >> 33;
    }
    TokenId((state % u64::from(VOCABULARY.get())) as u32)
}

/// Any ask, short enough that a case of dozens stays cheap.
pub fn asks() -> impl Strategy<Value = Ask> {
    let choices = prop_oneof![6 => Just(1u32), 1 => 2u32..=8];
    let identity = (-1i32..=1, 0u8..3, 0u64..3);
    (
        prompts(),
        stops(),
        choices,
        identity,
        prop::bool::weighted(0.1),
        patience(),
    )
        .prop_map(
            |(prompt, stop, num_choices, identity, prompt_logprobs, patience)| Ask {
                prompt,
                stop,
                num_choices,
                priority: identity.0,
                salt: identity.1,
                seed: identity.2,
                prompt_logprobs,
                patience,
            },
        )
}

/// Prompts that often share a beginning, and are often equal.
pub fn prompts() -> impl Strategy<Value = Prompt> {
    (0u8..3, 0u32..80, 0u8..6, 1u32..24).prop_map(|(family, shared, tail, own)| Prompt {
        family,
        shared,
        tail,
        own,
    })
}

fn stops() -> impl Strategy<Value = Stop> {
    let token = prop::option::weighted(0.3, 1..VOCABULARY.get());
    (1u32..32, 0u32..6, token, any::<bool>()).prop_map(
        |(max_tokens, min_tokens, token, ignore_eos)| Stop {
            max_tokens,
            min_tokens,
            token,
            ignore_eos,
        },
    )
}

fn patience() -> impl Strategy<Value = Patience> {
    let millis = || prop::option::weighted(0.5, 0u32..40);
    let given = (millis(), millis(), millis()).prop_map(|(queue, first_token, total)| Patience {
        queue,
        first_token,
        total,
    });
    prop_oneof![4 => Just(Patience::default()), 1 => given]
}
