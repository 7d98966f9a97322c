//! What a run tells the runs inside it, through the environment of CMD.

use std::time::Duration;

use lockkit::{Fence, LockKey, Token};

use crate::exit::Failure;

/// The leases of the enclosing runs: `KEY:TOKEN:TTL_MS:LASTS_MS:FENCE:RUN` each, the key in hexadecimal digits, joined by commas. What a later
/// version may add to each comes last.
pub(super) const HELD: &str = "LOCKKIT_HELD";

/// The numbers of the enclosing runs, joined by commas. By them a run knows the processes that it started.
pub(super) const RUNS: &str = "LOCKKIT_RUNS";

/// Marks a watchdog.
pub(super) const WATCHDOG: &str = "LOCKKIT_WATCHDOG";

/// The enclosing runs, outermost first.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Enclosing {
    pub(super) held: Vec<Entry>,
    pub(super) runs: Vec<String>,
}

/// A lease of an enclosing run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) key: LockKey,
    pub(super) token: Token,
    /// The ttl that was asked for.
    pub(super) ttl: Duration,
    /// How long the lease lasts if it is not renewed: on some stores not as long as was asked for.
    pub(super) lasts: Duration,
    /// The number of the grant. The store may show another one: a quorum, or the new store of a migration, to which the lease was taken along.
    pub(super) fence: Fence,
    /// The run that has it.
    pub(super) run: String,
}

impl Enclosing {
    /// What the environment says. What makes no sense is left out: it is not ours, or of another version.
    pub(super) fn from_env() -> Self {
        let text = |name| std::env::var(name).unwrap_or_default();
        Self::parse(&text(HELD), &text(RUNS))
    }

    fn parse(held: &str, runs: &str) -> Self {
        let runs = runs.split(',').filter(|run| run.parse::<Token>().is_ok()).map(str::to_owned);
        Self { held: held.split(',').filter_map(Entry::parse).collect(), runs: runs.collect() }
    }

    pub(super) fn held_text(&self) -> String {
        self.held.iter().map(Entry::text).collect::<Vec<_>>().join(",")
    }

    pub(super) fn runs_text(&self) -> String {
        self.runs.join(",")
    }
}

impl Entry {
    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<_> = text.split(':').collect();
        let [key, token, ttl, lasts, fence, run, ..] = fields[..] else { return None };
        let key = LockKey::new(String::from_utf8(unhex(key)?).ok()?).ok()?;
        run.parse::<Token>().ok()?;
        let millis = |text: &str| text.parse().ok().map(Duration::from_millis);
        let (ttl, lasts, fence) = (millis(ttl)?, millis(lasts)?, Fence::new(fence.parse().ok()?));
        Some(Self { key, token: token.parse().ok()?, ttl, lasts, fence, run: run.to_owned() })
    }

    fn text(&self) -> String {
        let key: String = self.key.as_str().bytes().map(|byte| format!("{byte:02x}")).collect();
        let (ttl, lasts) = (self.ttl.as_millis(), self.lasts.as_millis());
        format!("{key}:{}:{ttl}:{lasts}:{}:{}", self.token.reveal(), self.fence, self.run)
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u32> = text.chars().map(|c| c.to_digit(16)).collect::<Option<_>>()?;
    let pairs = digits.chunks_exact(2);
    pairs.remainder().is_empty().then(|| pairs.map(|pair| (pair[0] << 4 | pair[1]) as u8).collect())
}

/// A number for this run that no other has.
pub(super) fn run_id() -> Result<String, Failure> {
    Ok(Token::random()?.reveal())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_survive_the_environment_whatever_their_names() {
        let entry = |key: &str| Entry {
            key: LockKey::new(key).expect("name"),
            token: Token::random().expect("random"),
            ttl: Duration::from_millis(1500),
            lasts: Duration::from_millis(1480),
            fence: Fence::new(u64::MAX),
            run: run_id().expect("random"),
        };
        let held = vec![entry("plain"), entry("a:b,c=d \"é\"\n")];
        let runs = held.iter().map(|entry| entry.run.clone()).collect();
        let enclosing = Enclosing { held, runs };
        assert_eq!(Enclosing::parse(&enclosing.held_text(), &enclosing.runs_text()), enclosing);
    }

    #[test]
    fn nonsense_is_left_out() {
        let token = run_id().expect("random");
        for held in ["", ",", "x", "6b", &format!("6:{token}:1:1:1:{token}"), &format!("6b:{token}:1:1:{token}")] {
            assert_eq!(Enclosing::parse(held, "7,,zz"), Enclosing::default(), "{held}");
        }
        let later = format!("6b:{token}:1:1:1:{token}:7:new");
        assert_eq!(Enclosing::parse(&later, "").held, Enclosing::parse(later.trim_end_matches(":7:new"), "").held);
        assert_eq!(Enclosing::parse(&later, "").held.len(), 1, "a later version adds fields");
        assert_eq!(Enclosing::parse(&format!("zz:{token},6b:{token}:1:1:1:{token}"), "").held.len(), 1);
    }
}
