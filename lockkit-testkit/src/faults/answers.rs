//! Telling the answers of a server from each other, to lose one whole answer of many, or to have one come twice.

use std::mem;

/// How a protocol marks where an answer ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Framing {
    /// It need not be known: a client waits for each answer before it asks again, so that all that comes between two
    /// requests is one answer. So does MySQL.
    #[default]
    Turns,
    /// The protocol of Redis, in its second or third version.
    Redis,
    /// The length of each answer goes before it, in four bytes. So does ZooKeeper.
    Length,
    /// Each answer is a line.
    Lines,
}

/// What happens to one answer. The requests and all other answers pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slip {
    /// It is lost.
    Lost,
    /// It comes a second time, right before the next answer of its connection.
    Twice,
}

/// The answers on one connection.
#[derive(Debug)]
pub(super) struct Answers {
    framing: Framing,
    /// The server has begun to greet.
    greeted: bool,
    /// Where the present answer stands: it has begun, and not ended.
    begun: bool,
    fate: Option<Slip>,
    /// The present answer as far as it has come, if it is to come twice; then the whole of it, until the next one begins.
    copy: Vec<u8>,
    /// How many requests had been sent when it began.
    turn: u64,
    /// The line or the length that has come in part.
    head: Vec<u8>,
    /// How many bytes are to come before the next line or length.
    skip: usize,
    /// How many values are still to come in a Redis answer.
    values: usize,
}

impl Answers {
    pub(super) fn new(framing: Framing) -> Self {
        let (head, copy) = <(Vec<u8>, Vec<u8>)>::default();
        Self { framing, greeted: false, begun: false, fate: None, copy, turn: 0, head, skip: 0, values: 0 }
    }

    /// What is to be delivered of these bytes, which came after so many requests. Each answer's fate is asked for once, when
    /// it begins, and whether it is the greeting.
    pub(super) fn pass(&mut self, mut bytes: &[u8], turn: u64, fate: impl Fn(bool) -> Option<Slip>) -> Vec<u8> {
        let mut delivered = Vec::with_capacity(bytes.len());
        if self.framing == Framing::Turns && turn != self.turn {
            self.begun = false;
        }
        self.turn = turn;
        while !bytes.is_empty() {
            if !self.begun {
                self.begun = true;
                self.values = 1;
                delivered.append(&mut self.copy);
                self.fate = fate(!mem::replace(&mut self.greeted, true));
            }
            let end = self.end(bytes);
            let (part, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
            if self.fate != Some(Slip::Lost) {
                delivered.extend_from_slice(part);
            }
            if self.fate == Some(Slip::Twice) {
                self.copy.extend_from_slice(part);
            }
            self.begun = end.is_none();
            bytes = rest;
        }
        delivered
    }

    /// Where the present answer ends, if it does within these bytes.
    fn end(&mut self, bytes: &[u8]) -> Option<usize> {
        match self.framing {
            Framing::Turns => None,
            Framing::Lines => bytes.iter().position(|byte| *byte == b'\n').map(|at| at + 1),
            Framing::Length => self.end_by_length(bytes),
            Framing::Redis => self.end_by_values(bytes),
        }
    }

    fn end_by_length(&mut self, bytes: &[u8]) -> Option<usize> {
        let missing = 4 - self.head.len();
        let head = missing.min(bytes.len());
        if missing > 0 {
            self.head.extend_from_slice(&bytes[..head]);
            let length = <[u8; 4]>::try_from(self.head.as_slice()).ok()?;
            self.skip = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        }
        let body = self.skip.min(bytes.len() - head);
        self.skip -= body;
        (self.skip == 0).then(|| {
            self.head.clear();
            head + body
        })
    }

    fn end_by_values(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        while at < bytes.len() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len() - at);
                (self.skip, at) = (self.skip - skipped, at + skipped);
                self.values -= usize::from(self.skip == 0);
            } else {
                let line = bytes[at..].iter().position(|byte| *byte == b'\n').map(|end| at + end + 1);
                self.head.extend_from_slice(&bytes[at..line.unwrap_or(bytes.len())]);
                at = line?;
                self.value();
            }
            if self.values == 0 {
                return Some(at);
            }
        }
        None
    }

    /// Takes note of a line of the Redis protocol: a whole value, or the beginning of one.
    fn value(&mut self) {
        let line = mem::take(&mut self.head);
        let number = str::from_utf8(&line[1..]).ok().and_then(|text| text.trim_end().parse::<usize>().ok());
        match (line[0], number) {
            (b'*' | b'~' | b'>', Some(values)) => self.values += values,
            (b'%', Some(pairs)) => self.values += 2 * pairs,
            // What is said of the value that comes behind it.
            (b'|', Some(pairs)) => self.values += 2 * pairs + 1,
            (b'$' | b'=' | b'!', Some(length)) => {
                self.skip = length + 2;
                return;
            }
            // A value in one line, or none.
            _ => {}
        }
        self.values -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const REDIS: [&str; 9] = [
        "+OK\r\n",
        ":-12\r\n",
        "$-1\r\n",
        "$4\r\na\r\nb\r\n",
        "*-1\r\n",
        "*3\r\n$1\r\nx\r\n*0\r\n*2\r\n_\r\n:1\r\n",
        ">3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n",
        "%2\r\n+a\r\n*1\r\n:1\r\n+b\r\n=5\r\ntxt:x\r\n",
        "|1\r\n+a\r\n+b\r\n-ERR no\r\n",
    ];
    const LENGTH: [&str; 3] = ["\0\0\0\x02ab", "\0\0\0\0", "\0\0\0\x01c"];
    const LINES: [&str; 3] = ["one\n", "\n", "two\n"];

    /// Lets these answers pass, so many bytes at a time, with this fate for one of them.
    fn passed(framing: Framing, answers: &[&str], at_once: usize, which: usize, slip: Slip) -> String {
        let (mut passing, number) = (Answers::new(framing), Cell::new(0));
        let fate = |_| {
            number.set(number.get() + 1);
            (number.get() == which + 1).then_some(slip)
        };
        let all = answers.concat();
        let delivered: Vec<u8> = all.as_bytes().chunks(at_once).flat_map(|part| passing.pass(part, 0, fate)).collect();
        assert_eq!(number.get(), answers.len(), "so many answers");
        String::from_utf8(delivered).expect("text")
    }

    #[test]
    fn one_answer_is_lost_or_comes_twice_in_whatever_pieces() {
        for (framing, answers) in [(Framing::Redis, &REDIS[..]), (Framing::Length, &LENGTH), (Framing::Lines, &LINES)] {
            for (which, at_once) in (0..answers.len()).flat_map(|which| [1, 2, 3, 7, 1000].map(|n| (which, n))) {
                let mut lost = answers.to_vec();
                lost.remove(which);
                assert_eq!(passed(framing, answers, at_once, which, Slip::Lost), lost.concat());
                let mut twice = answers.to_vec();
                if which + 1 < answers.len() {
                    twice.insert(which, answers[which]);
                }
                assert_eq!(passed(framing, answers, at_once, which, Slip::Twice), twice.concat());
            }
        }
    }

    #[test]
    fn what_comes_between_two_requests_is_one_answer() {
        let mut passing = Answers::new(Framing::Turns);
        let second = |slip| move |_| Some(slip);
        assert_eq!(passing.pass(b"hello", 0, |_| None), b"hello");
        assert_eq!(passing.pass(b"a", 1, second(Slip::Twice)), b"a");
        assert_eq!(passing.pass(b"b", 1, |_| None), b"b");
        assert_eq!(passing.pass(b"c", 2, second(Slip::Lost)), b"ab");
        assert_eq!(passing.pass(b"d", 2, |_| None), b"");
        assert_eq!(passing.pass(b"e", 4, |_| None), b"e");
    }
}
