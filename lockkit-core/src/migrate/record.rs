//! The record that says in which store the locks are: pure, no I/O.

use std::time::Duration;

use super::phase::{Phase, Side};
use crate::{
    Error, ErrorKind, Fence, HolderInfo, Result, Token,
    store::{Identity, Record},
};

/// The first word of a record, with the version of its form.
const FORM: &str = "migration-1";
/// Of a home that keeps what it confirmed, and of one that may lose it.
const DURABLE: &str = "durable";
const FORGETFUL: &str = "forgetful";
/// The phase old, in which clients ask the new store, too.
const SHADOW: &str = "shadow";
/// Of a migration that is finished, in place of the side: before and after clients have stopped, and all nodes of the other store were told.
const ENDING: &str = "ending";
const OVER: &str = "over";

/// What both stores say of a migration.
///
/// `id`, `stores`, `home`, `home_is_durable`, `max_ttl`, `fresh` and `logs` stay the same throughout. What a store keeps also says which of the
/// two stores it is. A record is never removed: else a command that stood still for long could write one after the end, and clients would take
/// it for that of a migration under way. One that [is over](Self::is_over) stays until the next migration, which counts its epochs from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseRecord {
    /// Which migration it is.
    pub id: Token,
    /// The identities of the old store and the new one.
    pub stores: [Identity; 2],
    /// The store in which each change is made first; what the other has is the same, or older (rule M2).
    pub home: Side,
    /// Whether the home keeps what it confirmed, through crashes and fail-overs.
    pub home_is_durable: bool,
    /// The longest ttl of a lease.
    pub max_ttl: Duration,
    /// For how long a client may act on what it read, counted from before it asked.
    pub fresh: Duration,
    /// Grows with each change.
    pub epoch: u64,
    /// Where the locks are.
    pub phase: Phase,
    /// Whether the migration is finished: its clients get no locks any more, and another one may begin.
    pub is_over: bool,
    /// Whether the store that is not the home was told of the end, at all its nodes, and no client acts on what it read before. Until then no
    /// other migration begins: it would be written over the only place that knows, and its drain may be too short for these clients.
    pub is_told: bool,
    /// Whether clients also ask the new store, whose answers decide nothing; only in [`Phase::Old`].
    pub is_shadowed: bool,
    /// The phase before [`Phase::Both`]; in the other phases it is that phase itself.
    pub came_from: Phase,
    /// Every new grant lies above this.
    pub floor: Fence,
    /// What the logs had reached that fences follow, when the migration started: by as much as they have grown since, fences may
    /// have.
    pub logs: u64,
    /// New at every change, so that no two records are equal.
    pub stamp: Token,
}

impl PhaseRecord {
    /// How long after a change nobody acts on the phase before any more, measured by whoever made the change, from the moment
    /// at which both stores were seen to have it (rule M14): 2 % are for clocks that run at different rates.
    #[must_use]
    pub fn drain(&self) -> Duration {
        drain(self.max_ttl, self.fresh)
    }

    /// The record after a change to `goal`, with `floor` if that lies higher. Says nothing of when it may be written; see
    /// [`may_go`](Self::may_go).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if no single step leads there.
    pub fn next(&self, goal: Phase, floor: Fence) -> Result<Self> {
        if (self.phase == Phase::Both) == (goal == Phase::Both) {
            let why = format!("no single step leads from the phase {} to {goal}", self.phase);
            return Err(Error::invalid(why));
        }
        let came_from = if goal == Phase::Both { self.phase } else { goal };
        let (epoch, floor) = (self.epoch + 1, self.floor.max(floor));
        Ok(Self { epoch, phase: goal, is_shadowed: false, came_from, floor, stamp: Token::random()?, ..self.clone() })
    }

    /// The record after a change that has clients ask the new store, too, or no more. For exclusion that is the same phase.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the phase is another one than [`Phase::Old`].
    pub fn shadowed(&self, is_shadowed: bool) -> Result<Self> {
        if self.phase != Phase::Old {
            let why = format!("the new store is tried out in the phase old, and the phase is {}", self.phase);
            return Err(Error::invalid(why));
        }
        Ok(Self { is_shadowed, ..self.renewed()? })
    }

    /// The phase as people know it: one that is shadowed has a name of its own.
    #[must_use]
    pub const fn phase_name(&self) -> &'static str {
        if self.is_shadowed { SHADOW } else { self.phase.name() }
    }

    /// The same phase as a new record, which differs from this one in its epoch and its stamp.
    ///
    /// # Errors
    /// As those of [`Token::random`].
    pub fn renewed(&self) -> Result<Self> {
        Ok(Self { epoch: self.epoch + 1, stamp: Token::random()?, ..self.clone() })
    }

    /// Whether the step to `goal` may be taken at once, without a drain (rule M16): into [`Phase::Both`], and back to where
    /// that came from, unless the home may lose a change that it confirmed.
    #[must_use]
    pub fn may_go(&self, goal: Phase, home_is_durable: bool) -> bool {
        goal == Phase::Both || (goal == self.came_from && home_is_durable)
    }

    /// The record that ends the migration.
    ///
    /// # Errors
    /// As those of [`Token::random`].
    pub fn ended(&self) -> Result<Self> {
        Ok(Self { is_over: true, is_shadowed: false, ..self.renewed()? })
    }

    /// The end once the other store is told; always the same one, so that this can be repeated.
    #[must_use]
    pub fn told(&self) -> Self {
        if self.is_told { self.clone() } else { Self { epoch: self.epoch + 1, is_told: true, ..self.clone() } }
    }

    /// Whether it is of the same migration.
    #[must_use]
    pub fn is_of(&self, other: &Self) -> bool {
        (self.id, self.stores, self.home) == (other.id, other.stores, other.home)
            && (self.home_is_durable, self.max_ttl, self.fresh) == (other.home_is_durable, other.max_ttl, other.fresh)
    }

    /// What a store keeps, which also says that it is this one of the two, unless the migration is over: in the next one it may be the other.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if its times have no text.
    pub fn to_record(&self, at: Side) -> Result<Record> {
        let [old, new] = self.stores;
        let (max_ttl, fresh) = (self.max_ttl.as_millis(), self.fresh.as_millis());
        Record::new(format!(
            "{FORM};{};{};{old};{new};{};{};{max_ttl};{fresh};{};{};{};{};{};{}",
            match (self.is_over, self.is_told) {
                (false, _) => at.alone().name(),
                (true, false) => ENDING,
                (true, true) => OVER,
            },
            self.id.reveal(),
            self.home,
            if self.home_is_durable { DURABLE } else { FORGETFUL },
            self.epoch,
            self.phase_name(),
            self.came_from,
            self.floor,
            self.logs,
            self.stamp.reveal(),
        ))
    }

    /// Reads what that one of the two stores had.
    ///
    /// # Errors
    /// [`ErrorKind::Unexpected`] if it has another form; [`ErrorKind::Misconfigured`] if it is what the other one of the two keeps: with the stores
    /// the other way round, the phases would mean the opposite.
    pub fn from_record(record: &Record, at: Side) -> Result<Self> {
        let (found, is_at) = Self::parse(record.as_str()).ok_or_else(|| {
            let why = "the record of the migration has another form; it may be that of a newer version";
            Error::new(ErrorKind::Unexpected, why)
        })?;
        if is_at.is_some_and(|is_at| is_at != at) {
            let why =
                "the two stores of the migration stand the other way round, or it was started from both sides at once";
            return Err(Error::new(ErrorKind::Misconfigured, why));
        }
        Ok(found)
    }

    /// The record, and at which of the two stores it is, unless it is over.
    fn parse(text: &str) -> Option<(Self, Option<Side>)> {
        let words: Vec<&str> = text.split(';').collect();
        let [FORM, at, id, old, new, home, durable, max_ttl, fresh, epoch, phase, came_from, floor, logs, stamp] =
            words[..]
        else {
            return None;
        };
        let millis = |text: &str| Some(Duration::from_millis(text.parse().ok()?)).filter(|time| !time.is_zero());
        let record = Self {
            id: id.parse().ok()?,
            stores: [old.parse().ok()?, new.parse().ok()?],
            home: Side::named(home)?,
            home_is_durable: [FORGETFUL, DURABLE].iter().position(|word| *word == durable)? == 1,
            max_ttl: millis(max_ttl)?,
            fresh: millis(fresh)?,
            epoch: epoch.parse().ok()?,
            phase: if phase == SHADOW { Phase::Old } else { Phase::named(phase)? },
            is_over: [ENDING, OVER].contains(&at),
            is_told: at == OVER,
            is_shadowed: phase == SHADOW,
            came_from: Phase::named(came_from)?,
            floor: Fence::new(floor.parse().ok()?),
            logs: logs.parse().ok()?,
            stamp: stamp.parse().ok()?,
        };
        let is_sound = (record.phase == Phase::Both) != (record.phase == record.came_from);
        let at = if record.is_over { None } else { Some(Side::named(at)?) };
        (is_sound && record.came_from != Phase::Both).then_some((record, at))
    }
}

pub(super) fn drain(max_ttl: Duration, fresh: Duration) -> Duration {
    let sum = fresh + max_ttl;
    sum + sum / 50 + Duration::from_millis(10)
}

/// A holder's description with what marks it as a client of a migration behind it: a part of the id, and the phase as which it holds the lock
/// (rule M12).
pub(super) fn mark(info: &HolderInfo, id: &Token, phase: Phase) -> HolderInfo {
    info.followed_by(&format!(" ~{}:{phase}", &id.reveal()[..8]))
}

/// The description without the mark, and the phase of the mark, if there is one of this migration.
pub(super) fn unmark(info: &HolderInfo, id: &Token) -> (HolderInfo, Option<Phase>) {
    let found = info.as_str().rsplit_once(" ~").and_then(|(text, mark)| {
        let (part, phase) = mark.split_once(':')?;
        (part == &id.reveal()[..8]).then_some((HolderInfo::new(text), Phase::named(phase)?))
    });
    found.map_or_else(|| (info.clone(), None), |(text, phase)| (text, Some(phase)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> PhaseRecord {
        let token = || Token::random().expect("random");
        PhaseRecord {
            id: token(),
            stores: [token(), token()].map(|token| token.reveal().parse().expect("identity")),
            home: Side::Old,
            home_is_durable: false,
            max_ttl: Duration::from_secs(300),
            fresh: Duration::from_secs(10),
            epoch: 1,
            phase: Phase::Old,
            is_over: false,
            is_told: false,
            is_shadowed: false,
            came_from: Phase::Old,
            floor: Fence::NONE,
            logs: 0,
            stamp: token(),
        }
    }

    #[test]
    fn a_record_survives_its_text_even_at_its_longest() {
        let mut record = record();
        for (phase, came_from) in
            [(Phase::Old, Phase::Old), (Phase::Both, Phase::Old), (Phase::Both, Phase::New), (Phase::New, Phase::New)]
        {
            (record.phase, record.came_from, record.home) = (phase, came_from, Side::New);
            (record.epoch, record.floor, record.logs) = (u64::MAX, Fence::new(u64::MAX), u64::MAX);
            let text = record.to_record(Side::New).expect("text");
            assert_eq!(PhaseRecord::from_record(&text, Side::New).expect("record"), record);
            record.home_is_durable = !record.home_is_durable;
        }
        (record.phase, record.came_from, record.is_shadowed) = (Phase::Old, Phase::Old, true);
        let text = record.to_record(Side::New).expect("text");
        assert_eq!(PhaseRecord::from_record(&text, Side::New).expect("record"), record);
    }

    #[test]
    fn a_record_says_at_which_store_it_is_unless_it_is_over() {
        let record = record();
        let text = record.to_record(Side::Old).expect("text");
        assert_eq!(PhaseRecord::from_record(&text, Side::New).expect_err("the old").kind(), ErrorKind::Misconfigured);
        let end = record.ended().expect("end");
        assert!(end.is_of(&record) && end.is_over && !end.is_told && end.epoch == 2 && end.stamp != record.stamp);
        let told = end.told();
        assert!(told.is_over && told.is_told && told.epoch == 3 && told.told() == told && told == end.told());
        for end in [end, told] {
            assert_eq!(end.to_record(Side::Old).expect("text"), end.to_record(Side::New).expect("text"));
            for at in Side::ALL {
                assert_eq!(PhaseRecord::from_record(&end.to_record(at).expect("text"), at).expect("record"), end);
            }
        }
    }

    #[test]
    fn only_the_phase_old_has_a_shadow() {
        let old = record();
        let shadow = old.shadowed(true).expect("the phase is old");
        assert!(shadow.is_shadowed && shadow.epoch == 2 && shadow.stamp != old.stamp);
        assert!(shadow.renewed().expect("record").is_shadowed);
        assert!(!shadow.shadowed(false).expect("the phase is old").is_shadowed);
        let both = shadow.next(Phase::Both, Fence::NONE).expect("step");
        assert!(!both.is_shadowed);
        assert_eq!(both.shadowed(true).expect_err("both").kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn another_form_is_no_record() {
        let good = record().to_record(Side::Old).expect("text");
        let is_refused = |text: String| {
            let text = Record::new(text).expect("record");
            let error = PhaseRecord::from_record(&text, Side::Old).expect_err("another form");
            assert_eq!(error.kind(), ErrorKind::Unexpected);
        };
        is_refused(good.as_str().replace("migration-1", "migration-2"));
        is_refused(good.as_str().replace("migration-1;old", "migration-1;both"));
        is_refused(good.as_str().replace(";1;old;old;", ";1;old;both;"));
        is_refused(good.as_str().replace(";1;old;old;", ";1;both;both;"));
        is_refused(good.as_str().replace(";1;old;old;", ";1;shadow;new;"));
        is_refused(good.as_str().replace(";10000;", ";0;"));
        is_refused(format!("{};x", good.as_str()));
        is_refused("x".to_owned());
    }

    #[test]
    fn steps_lead_through_both_and_never_lower_the_floor() {
        let old = record();
        assert_eq!(old.next(Phase::New, Fence::NONE).expect_err("a leap").kind(), ErrorKind::InvalidInput);
        assert!(old.next(Phase::Old, Fence::NONE).is_err());
        let both = old.next(Phase::Both, Fence::NONE).expect("step");
        assert!(both.next(Phase::Both, Fence::NONE).is_err());
        assert_eq!((both.epoch, both.came_from), (2, Phase::Old));
        assert!(both.may_go(Phase::Old, true) && !both.may_go(Phase::Old, false) && !both.may_go(Phase::New, true));
        let new = both.next(Phase::New, Fence::new(7)).expect("step");
        let back = new.next(Phase::Both, Fence::new(3)).expect("step");
        assert_eq!((new.floor, back.floor, back.came_from), (Fence::new(7), Fence::new(7), Phase::New));
        assert!(back.is_of(&old) && back.stamp != new.stamp);
        assert_eq!(old.drain(), Duration::from_millis(316_210));
    }

    #[test]
    fn a_mark_is_found_and_taken_off() {
        let (id, other) = (record().id, record().id);
        for text in ["billing@web-3:4711", "", &"é".repeat(128), "a ~b:old"] {
            let marked = mark(&HolderInfo::new(text), &id, Phase::Both);
            assert!(marked.as_str().len() <= HolderInfo::MAX_BYTES);
            let (plain, phase) = unmark(&marked, &id);
            assert!(text.starts_with(plain.as_str()), "{plain}");
            assert_eq!(phase, Some(Phase::Both));
            assert_eq!(unmark(&marked, &other), (marked.clone(), None));
        }
    }
}
