//! Recognising the request whose reply is to be lost.

/// Waits for a pattern in what clients send, and springs once.
#[derive(Clone, Debug)]
pub(super) struct Trap {
    pattern: Vec<u8>,
    countdown: usize,
}

impl Trap {
    /// A trap for the `nth` occurrence of the pattern. The empty pattern occurs in everything that is sent.
    pub(super) fn new(pattern: Vec<u8>, nth: usize) -> Self {
        Self { pattern, countdown: nth.max(1) }
    }

    /// Takes note of what one connection sends next; whether the trap springs with it.
    ///
    /// `before` is that connection's memory of what it sent just before, for a pattern may arrive in pieces.
    pub(super) fn springs(&mut self, before: &mut Vec<u8>, bytes: &[u8]) -> bool {
        // With one byte less than the pattern remembered, no occurrence is counted twice, or counted although it was
        // over before the trap was set.
        let memory = self.pattern.len().saturating_sub(1);
        before.drain(..before.len().saturating_sub(memory));
        before.extend_from_slice(bytes);
        let seen = match self.pattern.len() {
            0 => 1,
            length => before.windows(length).filter(|&window| window == self.pattern).count(),
        };
        before.drain(..before.len().saturating_sub(memory));
        let was_set = self.countdown > 0;
        self.countdown = self.countdown.saturating_sub(seen);
        was_set && self.countdown == 0
    }

    /// Sets the trap again, for the next occurrence, if it sprang.
    pub(super) fn set_again(&mut self) {
        self.countdown = self.countdown.max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_occurrence_springs_the_trap() {
        let mut trap = Trap::new(b"SET".to_vec(), 3);
        let mut before = Vec::new();
        assert!(!trap.springs(&mut before, b"SET SET"));
        assert!(!trap.springs(&mut before, b" GET"));
        assert!(trap.springs(&mut before, b" SET"));
        assert!(!trap.springs(&mut before, b" SET"));
        trap.set_again();
        assert!(trap.springs(&mut before, b" SET"));
    }

    #[test]
    fn a_pattern_in_pieces_is_seen_once() {
        let mut trap = Trap::new(b"SET".to_vec(), 2);
        let mut before = Vec::new();
        for piece in [b"S", b"E", b"T", b"S", b"E"] {
            assert!(!trap.springs(&mut before, piece));
        }
        assert!(trap.springs(&mut before, b"T"));
    }

    #[test]
    fn connections_are_not_mixed_up() {
        let mut trap = Trap::new(b"SET".to_vec(), 1);
        let (mut one, mut other) = (Vec::new(), Vec::new());
        assert!(!trap.springs(&mut one, b"SE"));
        assert!(!trap.springs(&mut other, b"T"));
        assert!(trap.springs(&mut one, b"T"));
    }

    #[test]
    fn what_was_sent_before_the_trap_was_set_does_not_count() {
        let mut before = Vec::new();
        assert!(!Trap::new(b"SET key".to_vec(), 1).springs(&mut before, b"SET ke"));
        assert!(!Trap::new(b"SET".to_vec(), 1).springs(&mut before, b"y"));
    }

    #[test]
    fn the_empty_pattern_is_in_everything() {
        assert!(Trap::new(Vec::new(), 0).springs(&mut Vec::new(), b"x"));
    }
}
