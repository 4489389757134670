//! A link with every fault that a link can have, drawn from its own dice.

use millpond_scheduler::mock::BlockImage;
use millpond_scheduler::sim::dice::Dice;
use millpond_scheduler::{KvTransfer, Peer, Piece, Span, Timestamp};

/// How a link misbehaves. Probabilities are per piece.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkFaults {
    pub loss: f64,
    pub duplication: f64,
    pub corruption: f64,
    /// Pieces take up to so long, each its own time, so that they overtake each other.
    pub max_delay: Span,
}

/// Pieces on their way.
pub struct FaultyLink {
    pub faults: LinkFaults,
    pub num_corrupted: u64,
    dice: Dice,
    pieces: Vec<(Timestamp, Piece<BlockImage>)>,
}

impl FaultyLink {
    pub fn new(faults: LinkFaults, dice: Dice) -> Self {
        FaultyLink {
            faults,
            num_corrupted: 0,
            dice,
            pieces: Vec::new(),
        }
    }

    fn send(&mut self, mut piece: Piece<BlockImage>, now: Timestamp) {
        if self.dice.chance(self.faults.loss) {
            return;
        }
        if self.dice.chance(self.faults.corruption) {
            piece.payload.flip_bit(self.dice.bits());
            self.num_corrupted += 1;
        }
        let delay = Span(self.dice.below(self.faults.max_delay.0 + 1));
        self.pieces.push((now + delay, piece));
    }
}

impl KvTransfer for FaultyLink {
    type Payload = BlockImage;

    fn start(&mut self, piece: Piece<BlockImage>, now: Timestamp) {
        if self.dice.chance(self.faults.duplication) {
            self.send(piece.clone(), now);
        }
        self.send(piece, now);
    }

    fn poll(&mut self, at: Peer, now: Timestamp, arrived: &mut Vec<Piece<BlockImage>>) {
        let is_there =
            |(due, piece): &mut (Timestamp, Piece<BlockImage>)| *due <= now && piece.to == at;
        let mut there: Vec<_> = self.pieces.extract_if(.., is_there).collect();
        there.sort_by_key(|(due, _)| *due);
        arrived.extend(there.into_iter().map(|(_, piece)| piece));
    }
}
