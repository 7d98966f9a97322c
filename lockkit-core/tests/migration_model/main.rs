//! Models of the migration between two stores, each searched completely: what always holds, and what breaks as soon as one
//! safeguard is off.
//!
//! The models make the decisions of the code itself, not copies of them: the record and its steps ([`PhaseRecord::next`], `renewed`, `may_go`,
//! `drain`, equality), the stores of a phase ([`Phase::uses`], `sides`), and all of [`rules`]: whether a reading is fresh and a grant or a renewal
//! stands, until when it may be believed in, which stores a renewal asks and adds, the floor and the raise of a grant in both stores,
//! which record is newer, which one a store is given, and whether it has the very one that is drained.
//!
//! - `exclusion`, with `migrators`: timed. Clients and migrators that may stop anywhere, leases that lapse, readings that grow old, a store
//!   that falls back by one write of the record. Epochs are ranks, so that the phase may change any number of times, forward and back.
//! - `fences`: untimed. What the stores' counters give, the floors, and which fences are returned in which order.
//! - `waiting`: untimed. Who waits for which store while holding the other.
//!
//! Not modelled: the code between these decisions (which request is sent when; the models let a client send any request at any time);
//! the claims of one client and their tokens; more than one lock; modes other than exclusive; spans of fences; quorums, whose nodes may
//! differ; clocks of different rates, which the drain has 2 % for; stores that don't exclude, or whose records can't be read linearizably;
//! more than one loss; how a floor is found.
//!
//! [`PhaseRecord::next`]: lockkit_core::migrate::PhaseRecord::next
//! [`Phase::uses`]: lockkit_core::migrate::Phase::uses
//! [`rules`]: lockkit_core::migrate::rules

mod exclusion;
mod fences;
mod migrators;
mod records;
mod search;
mod waiting;

use exclusion::{Action, Check, Exclusion, State};
use fences::{Fences, Floor};
use lockkit_core::migrate::{Phase, Side};
use search::{Wanted, breaks, holds, stuck};
use waiting::{CLIENTS, Stage, Waiting};

const SOUND: Exclusion = Exclusion::SOUND;
/// To switch a safeguard off.
const NAMED: Exclusion = Exclusion { is_symmetric: false, ..SOUND };
/// With as few ticks as there can be.
const TWO_MIGRATORS: Exclusion = Exclusion { migrators: 2, max_ttl: 1, answer: 1, drain: Some(1), ..SOUND };
/// The new store may fall back.
const LOSSY: Exclusion = Exclusion { loses: Some(Side::New), drain: Some(2), ..SOUND };
/// The home may.
const LOSSY_HOME: Exclusion = Exclusion { loses: Some(Side::Old), ..LOSSY };

/// 24 564 states each; 23 884 with the shortest drain, 125 724 with readings that are good for two ticks.
#[test]
fn two_clients_exclude_each_other() {
    holds("two clients", SOUND);
    holds("two clients, the new store is the home", Exclusion { home: Side::New, ..SOUND });
    holds("two clients, the shortest drain", Exclusion { drain: Some(2), ..SOUND });
    holds("two clients, readings good for two ticks", Exclusion { fresh: 2, drain: Some(3), ..SOUND });
}

/// 68 872 states.
#[test]
fn three_clients_exclude_each_other() {
    holds("three clients", Exclusion { clients: 3, drain: Some(2), ..SOUND });
}

/// 136 060 states.
#[test]
fn clients_exclude_each_other_under_two_migrators() {
    holds("two migrators", TWO_MIGRATORS);
}

/// 51 228 states.
#[test]
fn clients_exclude_each_other_at_a_store_whose_leases_outlast_the_ttl() {
    holds("a store with sessions", Exclusion { answer: 3, drain: Some(2), ..SOUND });
}

/// 187 204 states each; 188 532 where the home loses.
#[test]
fn clients_exclude_each_other_though_a_store_loses_a_record() {
    holds("the new store loses", LOSSY);
    holds(
        "the old store loses, the new one is the home",
        Exclusion { home: Side::New, loses: Some(Side::Old), ..LOSSY },
    );
    holds("the home loses", LOSSY_HOME);
}

/// 1 044 656 states.
#[test]
fn clients_exclude_each_other_under_two_migrators_though_a_store_loses_a_record() {
    holds("the new store loses, two migrators", Exclusion { loses: Some(Side::New), ..TWO_MIGRATORS });
}

/// Whatever happened, somebody can be granted the lock without any migrator; where both stores agree on the phase, in that.
#[test]
fn somebody_can_always_be_granted_the_lock() {
    fn is_settled(state: &State, phase: Phase) -> bool {
        state.records.iter().all(|record| record.phase == phase)
    }
    fn is_held(state: &State, phase: Phase) -> bool {
        state.clients.iter().any(|client| client.belief.is_some_and(|(held, _)| held == phase))
    }
    let wanted = [
        Wanted {
            what: "a grant",
            from: |_: &State| true,
            goal: |state| state.clients.iter().any(|client| client.belief.is_some()),
        },
        Wanted {
            what: "a grant as of Old",
            from: |state| is_settled(state, Phase::Old),
            goal: |state| is_held(state, Phase::Old),
        },
        Wanted {
            what: "a grant as of Both",
            from: |state| is_settled(state, Phase::Both),
            goal: |state| is_held(state, Phase::Both),
        },
        Wanted {
            what: "a grant as of New",
            from: |state| is_settled(state, Phase::New),
            goal: |state| is_held(state, Phase::New),
        },
    ];
    assert_eq!(stuck("two clients", &SOUND, Action::is_of_clients, &wanted), None);
    let three = Exclusion { clients: 3, drain: Some(2), ..SOUND };
    assert_eq!(stuck("three clients", &three, Action::is_of_clients, &wanted), None);
}

#[test]
fn a_drain_is_needed() {
    breaks("no drain", Exclusion { drain: Some(0), ..NAMED });
}

#[test]
fn each_tick_of_the_drain_is_needed() {
    breaks("a drain that is one tick short", Exclusion { fresh: 2, drain: Some(2), ..NAMED });
}

#[test]
fn a_drain_begins_when_both_stores_have_the_record() {
    breaks("a drain from the moment at which the home has the record", Exclusion { copies: false, ..NAMED });
}

#[test]
fn the_way_leads_through_both() {
    breaks("from Old to New", Exclusion { through_both: false, ..NAMED });
}

#[test]
fn what_was_read_gets_too_old() {
    breaks("what was read last counts for ever", Exclusion { check: Check::Never, ..NAMED });
}

#[test]
fn the_clock_counts_while_the_machine_is_suspended() {
    breaks("a clock that stands still after the reading", Exclusion { clocks_run: false, ..NAMED });
}

#[test]
fn the_record_is_checked_after_the_answers() {
    breaks("a check before the stores are asked", Exclusion { check: Check::Before, ..NAMED });
}

#[test]
fn the_record_is_checked_at_renewals() {
    breaks("a check at grants alone", Exclusion { check: Check::AtGrants, ..NAMED });
}

#[test]
fn both_stores_are_renewed() {
    breaks("a renewal of the old store alone", Exclusion { renews_both: false, ..NAMED });
}

#[test]
fn records_change_by_compare_and_set() {
    breaks("two migrators that overwrite", Exclusion { compares: false, is_symmetric: false, ..TWO_MIGRATORS });
}

#[test]
fn there_is_one_home() {
    breaks("two migrators, each with its home", Exclusion { one_home: false, is_symmetric: false, ..TWO_MIGRATORS });
}

#[test]
fn all_clients_know_of_the_migration() {
    breaks("a client that knows of no migration", Exclusion { plain_client: true, ..NAMED });
}

#[test]
fn no_belief_outlasts_the_longest_ttl() {
    breaks("leases that outlast the drain", Exclusion { answer: 5, caps: false, ..NAMED });
}

#[test]
fn both_stores_are_read_again_after_the_drain() {
    breaks("a store that fell back during the drain", Exclusion { reads_again: false, is_symmetric: false, ..LOSSY });
}

#[test]
fn a_home_that_may_fall_back_is_drained_on_the_way_back_too() {
    breaks("back at once", Exclusion { durable_return: false, is_symmetric: false, ..LOSSY_HOME });
}

/// A migrator that starts from the home's record alone writes it anew until both stores have it, which is safe (212 846 states). It is not
/// if a newer record at the other store will do.
#[test]
fn a_home_that_fell_back_is_made_to_follow_the_other_store() {
    let home_alone = Exclusion { heals: false, ..LOSSY_HOME };
    holds("a migrator that goes by the home", home_alone);
    breaks(
        "a migrator that goes by the home, whatever the other store has",
        Exclusion { exact: false, is_symmetric: false, ..home_alone },
    );
}

/// Whatever happened, the migration can go on to either end.
#[test]
fn a_migration_can_always_go_on() {
    let wanted = [
        Wanted {
            what: "both stores in Old",
            from: |_: &State| true,
            goal: |state| state.records.iter().all(|record| record.phase == Phase::Old),
        },
        Wanted {
            what: "both stores in New",
            from: |_: &State| true,
            goal: |state| state.records.iter().all(|record| record.phase == Phase::New),
        },
    ];
    let one = Exclusion { clients: 0, ..LOSSY_HOME };
    assert_eq!(stuck("the home loses", &one, |_| true, &wanted), None);
}

#[test]
fn a_home_that_may_fall_back_allows_one_migrator() {
    breaks("the home loses, two migrators", Exclusion { loses: Some(Side::Old), ..TWO_MIGRATORS });
}

/// One migrator waits; the store falls back, and another migrator copies the very record there again: the first one sees nothing of it.
#[test]
fn a_store_that_fell_back_gets_a_new_record() {
    let same = Exclusion { renews_records: false, loses: Some(Side::New), ..TWO_MIGRATORS };
    breaks("the new store loses, two migrators, the same record again", same);
}

/// 690 984 states.
#[test]
fn fences_rise_through_any_number_of_changes() {
    holds("fences", Fences::SOUND);
}

/// 148 223, 16 978, 39 924 and 141 274 states.
#[test]
fn fences_rise() {
    holds("fences, back at once, 4 changes", Fences { durable_home: true, changes: Some(4), ..Fences::SOUND });
    holds("fences that jump, 2 changes", Fences { jumps: true, changes: Some(2), ..Fences::SOUND });
    let unread = Fences { floor: Floor::Unread, changes: Some(3), ..Fences::SOUND };
    holds("fences, the floor found while leases of before last, 3 changes", unread);
    let added = Fences { raises_added: false, changes: Some(4), ..Fences::SOUND };
    holds("fences, a store that is added is not raised, 4 changes", added);
}

#[test]
fn fences_need_a_floor() {
    breaks("no floor", Fences { floor: Floor::Missing, ..Fences::NAMED });
}

#[test]
fn fences_need_a_floor_that_is_found_late() {
    breaks("a floor found before the drain", Fences { floor: Floor::Early, ..Fences::NAMED });
}

#[test]
fn the_new_store_grants_no_less_than_the_old_one() {
    breaks("the new store is asked for any fence", Fences { carries: false, ..Fences::NAMED });
}

#[test]
fn the_old_store_is_raised() {
    breaks("the old store is not raised", Fences { raises: false, ..Fences::NAMED });
}

#[test]
fn a_grant_is_compared_with_the_floor_that_was_checked() {
    let model = Fences { checks_floor: false, asks_blindly: true, ..Fences::NAMED };
    breaks("a grant that was asked for under the record before", model);
}

#[test]
fn nobody_waits_for_one_store_while_holding_the_other() {
    let all_end = [Wanted {
        what: "the end of all clients",
        from: |_: &[Stage; CLIENTS]| true,
        goal: |clients| clients.iter().all(|stage| *stage == Stage::Ended),
    }];
    let stuck = |gives_way: bool| stuck("waiting", &Waiting { gives_way }, |_| true, &all_end);
    assert_eq!(stuck(true), None);
    println!("{}", stuck(false).expect("two wait for each other"));
}
