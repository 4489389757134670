//! What goes wrong, how often, and until when. Drawn from the run's seed; nothing strikes by itself here.

use serde::{Deserialize, Serialize};

use super::dice::Dice;
use super::worker::Trouble;
use crate::request::RowError;
use crate::time::{Span, Timestamp};

/// How likely each fault is, per occasion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultRates {
    /// Per request: its client goes away some time after it was sent.
    pub client_gone: f64,
    /// Per step: it takes up to twenty times as long.
    pub slow_step: f64,
    /// Per step: one of its rows comes out as NaN.
    pub row_error: f64,
    /// Per step: it fails as a whole.
    pub step_error: f64,
    /// Per step: the device refuses the memory it needs, and it fails as a whole.
    pub memory_refused: f64,
    /// Per step: the worker dies in the middle of it and comes back empty.
    pub crash: f64,
    /// Per transfer: it never arrives.
    pub transfer_lost: f64,
    /// Per transfer: it arrives after everybody gave up.
    pub transfer_late: f64,
    /// Per transfer: it arrives twice.
    pub transfer_duplicated: f64,
    /// Per transfer: a bit of it is flipped on the way.
    pub transfer_corrupted: f64,
    /// Per transfer: the receiving device refuses it.
    pub transfer_refused: f64,
}

impl FaultRates {
    /// Nothing goes wrong.
    pub const NONE: FaultRates = FaultRates {
        client_gone: 0.0,
        slow_step: 0.0,
        row_error: 0.0,
        step_error: 0.0,
        memory_refused: 0.0,
        crash: 0.0,
        transfer_lost: 0.0,
        transfer_late: 0.0,
        transfer_duplicated: 0.0,
        transfer_corrupted: 0.0,
        transfer_refused: 0.0,
    };

    /// Everything goes wrong now and then.
    pub const MIXED: FaultRates = FaultRates {
        client_gone: 0.15,
        slow_step: 0.02,
        row_error: 0.01,
        step_error: 0.005,
        memory_refused: 0.005,
        crash: 0.003,
        transfer_lost: 0.08,
        transfer_late: 0.08,
        transfer_duplicated: 0.08,
        transfer_corrupted: 0.08,
        transfer_refused: 0.05,
    };

    /// Each rate `factor` times as high; several things that exclude each other never add up to more than
    /// certainty, the first ones come first.
    pub fn times(self, factor: f64) -> Self {
        FaultRates {
            client_gone: self.client_gone * factor,
            slow_step: self.slow_step * factor,
            row_error: self.row_error * factor,
            step_error: self.step_error * factor,
            memory_refused: self.memory_refused * factor,
            crash: self.crash * factor,
            transfer_lost: self.transfer_lost * factor,
            transfer_late: self.transfer_late * factor,
            transfer_duplicated: self.transfer_duplicated * factor,
            transfer_corrupted: self.transfer_corrupted * factor,
            transfer_refused: self.transfer_refused * factor,
        }
    }
}

/// What happens to a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carriage {
    /// It arrives as it was sent.
    Whole,
    /// It never arrives.
    Lost,
    /// It arrives as it was sent, too late.
    Late,
    /// It arrives twice.
    Twice,
    /// It arrives with a bit flipped.
    Corrupt,
    /// The receiver has no room for it.
    Refused,
}

/// What happens to a step.
#[derive(Clone, Debug, PartialEq)]
pub enum StepFate {
    /// It runs, perhaps with trouble.
    Run(Option<Trouble>),
    /// Its worker dies in the middle of it.
    Crash,
}

/// Draws the faults of one run.
#[derive(Clone, Debug)]
pub struct Fates {
    rates: FaultRates,
    until: Timestamp,
    steps: Dice,
    clients: Dice,
    transfers: Dice,
}

impl Fates {
    /// The faults of `dice`, none of which strikes at `until` or later.
    pub fn new(rates: FaultRates, until: Timestamp, dice: &Dice) -> Self {
        Fates {
            rates,
            until,
            steps: dice.fork(1),
            clients: dice.fork(2),
            transfers: dice.fork(3),
        }
    }

    /// How long after its request is sent a client goes away, if it does; `patience` at most.
    pub fn of_client(&mut self, now: Timestamp, patience: Span) -> Option<Span> {
        let leaves = self.clients.chance(self.rates.client_gone);
        let after = Span(self.clients.below(patience.0.max(1)));
        (leaves && now + after < self.until).then_some(after)
    }

    /// What happens to a step that begins now.
    pub fn of_step(&mut self, now: Timestamp) -> StepFate {
        let rates = self.rates;
        if now >= self.until {
            return StepFate::Run(None);
        }
        let dice = &mut self.steps;
        if dice.chance(rates.crash) {
            return StepFate::Crash;
        }
        let kinds = [
            rates.slow_step,
            rates.row_error,
            rates.step_error,
            rates.memory_refused,
        ];
        StepFate::Run(match choose(dice, &kinds) {
            Some(0) => Some(Trouble::Slow(dice.between(2, 20))),
            Some(1) => Some(Trouble::Row(
                dice.between(0, u32::MAX - 1),
                RowError::NonFiniteLogits,
            )),
            Some(2) => Some(Trouble::Step("the device was lost")),
            Some(_) => Some(Trouble::Step("the device is out of memory")),
            None => None,
        })
    }

    /// What happens to a transfer that begins now.
    pub fn of_transfer(&mut self, now: Timestamp) -> Carriage {
        let rates = self.rates;
        if now >= self.until {
            return Carriage::Whole;
        }
        let kinds = [
            rates.transfer_lost,
            rates.transfer_late,
            rates.transfer_duplicated,
            rates.transfer_corrupted,
            rates.transfer_refused,
        ];
        match choose(&mut self.transfers, &kinds) {
            None => Carriage::Whole,
            Some(0) => Carriage::Lost,
            Some(1) => Carriage::Late,
            Some(2) => Carriage::Twice,
            Some(3) => Carriage::Corrupt,
            Some(_) => Carriage::Refused,
        }
    }
}

/// One of several things that exclude each other, or none of them.
fn choose(dice: &mut Dice, rates: &[f64]) -> Option<usize> {
    let mut roll = dice.unit();
    rates.iter().position(|rate| {
        let hit = roll < *rate;
        roll -= rate;
        hit
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_strikes_about_as_often_as_it_should_and_none_after_the_end() {
        let until = Timestamp(1_000);
        let mut fates = Fates::new(FaultRates::MIXED, until, &Dice::new(5));
        let mut counts = [0u32; 6];
        for _ in 0..10_000 {
            let kind = match fates.of_transfer(Timestamp(0)) {
                Carriage::Whole => 0,
                Carriage::Lost => 1,
                Carriage::Late => 2,
                Carriage::Twice => 3,
                Carriage::Corrupt => 4,
                Carriage::Refused => 5,
            };
            counts[kind] += 1;
            assert_eq!(fates.of_transfer(until), Carriage::Whole);
            assert_eq!(fates.of_step(until), StepFate::Run(None));
        }
        for (count, rate) in counts.into_iter().zip([0.63, 0.08, 0.08, 0.08, 0.08, 0.05]) {
            let share = f64::from(count) / 10_000.0;
            assert!((share - rate).abs() < 0.015, "{counts:?}");
        }
    }

    #[test]
    fn clients_leave_before_the_faults_end() {
        let rates = FaultRates {
            client_gone: 1.0,
            ..FaultRates::NONE
        };
        let mut fates = Fates::new(rates, Timestamp(100), &Dice::new(1));
        let leave = |now| fates.of_client(Timestamp(now), Span(50));
        let times: Vec<_> = (0..200).filter_map(leave).collect();
        assert!(times.len() > 50 && times.len() < 100);
        assert!(times.iter().all(|after| after.0 < 50));
    }
}
