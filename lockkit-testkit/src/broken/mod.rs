//! Known-bad stores: the classic mistakes, one at a time, on a small store that is correct without them.
//!
//! A suite that never failed anything proves nothing. Each [`Bug`] names the cases that must fail with it, and what
//! their messages must say; `tests/known_bad.rs` holds the suite to that. The author of a case adds the bug that it is
//! there for.
//!
//! The store is a machine with one TCP port (`wire.rs`) on which small steps run one after the other (`table.rs`, `record.rs`), and
//! clients that send them (`store.rs`). What is wrong stands there beside what is right, marked `BUG`.

mod backend;
mod local;
mod record;
mod records;
mod store;
mod table;
mod wire;

pub use self::{backend::SimpleBackend, local::LocalStore};

/// A case that must fail, and a part of what it must say: it has to be the rule that it complains about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Catch {
    /// The case.
    pub case: &'static str,
    /// What its message contains.
    pub says: &'static str,
}

/// Makes the enum and its table of one list, so that no bug can be without a case.
macro_rules! bugs {
    ($($bug:ident $what:literal => $($case:literal says $says:literal),+;)*) => {
        /// What is wrong with a [`SimpleBackend`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Bug {
            $(#[doc = $what] $bug,)*
        }

        impl Bug {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$bug),*];

            /// What is wrong, in one sentence.
            #[must_use]
            pub const fn what(self) -> &'static str {
                match self {
                    $(Self::$bug => $what,)*
                }
            }

            /// The cases that must name it.
            #[must_use]
            pub const fn caught_by(self) -> &'static [Catch] {
                match self {
                    $(Self::$bug => &[$(Catch { case: $case, says: $says }),+],)*
                }
            }
        }
    };
}

bugs! {
    SetThenExpire "The lease is written first and gets its expiry in a second step, which may never come." =>
        "cancellation::a_forgotten_acquisition_lapses" says "never became free";
    NoExpiry "The lease has no expiry: who dies holding it holds it for ever." =>
        "expiry::the_lease_of_a_dead_holder_lapses" says "after its end",
        "modes::a_lapsed_permit_is_available_again" says "after its end",
        "cancellation::a_forgotten_acquisition_lapses" says "never became free",
        "cancellation::a_guard_may_outlive_its_runtime" says "the lease did not lapse",
        "faults::a_partitioned_holder_loses_in_time" says "never free";
    WholeSeconds "The expiry is rounded down to whole seconds." =>
        "expiry::no_ttl_is_rounded_down" says "still believed";
    OneTooMany "One more may hold a lock than may be." =>
        "lifecycle::a_held_lock_is_refused" says "granted twice",
        "lifecycle::names_do_not_interfere" says "granted twice",
        "expiry::an_unrenewed_lease_lapses" says "while the guard still believed",
        "expiry::a_manual_renewal_extends" says "granted twice",
        "expiry::a_renewed_lease_outlives_its_ttl" says "granted twice",
        "reentrancy::guards_end_in_any_order" says "granted twice",
        "contention::a_crowd_loses_no_update" says "is stale",
        "contention::without_hand_over_no_update_is_lost" says "is stale",
        "contention::zero_wait_is_a_try" says "a held lock was granted",
        "contention::the_waiting_time_is_kept" says "a held lock was granted",
        "faults::a_storm_of_cuts_loses_no_update" says "is stale",
        "modes::permits_are_never_exceeded" says "a third holder of two permits",
        "multi::all_are_had_or_none" says "although another has one",
        "multi::clients_wait_in_no_circle" says "two have all of them",
        "election::one_leads_and_all_see_which" says "two lead at once",
        "election::what_can_not_be_handed_over_is_refused" says "granted twice";
    ClientClock "Expiry is judged by the wall clock of whoever asks." =>
        "expiry::another_clock_takes_nothing" says "a client with another clock took a held lock",
        "window::another_clock_ends_no_window" says "granted twice";
    ValidityFromReply "The lease is believed to last from the reply on, not from the request." =>
        "faults::validity_counts_from_the_request" says "later than request + ttl";
    DeletesAnyones "A release deletes the lease without a look at whose it is." =>
        "ownership::a_foreign_release_changes_nothing" says "NotHeld(Taken)",
        "ownership::a_late_release_spares_the_successor" says "NotHeld(Taken)";
    GetThenDelete "A release reads whose lease it is and deletes it in a second step." =>
        "ownership::a_release_that_races_expiry_spares_the_successor" says "the successor's lease was deleted";
    ReleaseLeftToLapse "A release answers Released, and the lease ends when it would have without." =>
        "lifecycle::a_released_lock_is_free_at_once" says "should be free",
        "lifecycle::a_dropped_guard_frees_its_lock" says "not free within",
        "lifecycle::a_broken_lock_is_free" says "should be free",
        "lifecycle::the_holder_is_shown_while_it_holds" says "a former holder is shown",
        "expiry::max_hold_ends_a_forgotten_guard" says "not freed at max_hold",
        "reentrancy::an_owner_nests" says "not free after the last release",
        "contention::everyone_gets_a_turn" says "does not go from one client to another",
        "cancellation::an_abandoned_release_still_releases" says "still held",
        "cancellation::an_abandoned_waiter_does_not_stall_others" says "stalled by those that left",
        "cancellation::a_shutdown_drains" says "should be free",
        "window::work_that_is_longer_than_the_window_is_released" says "it should be free";
    HidesNotMine "A release answers Released whether or not the lease was the caller's." =>
        "lifecycle::a_second_release_says_so" says "NotHeld(Gone)",
        "ownership::a_foreign_release_changes_nothing" says "NotHeld(Taken)";
    RenewCreates "A renewal writes the lease anew if it is gone." =>
        "ownership::renewal_never_creates" says "Held(",
        "ownership::renewal_never_resurrects" says "Held(",
        "faults::a_deleted_lock_is_lost" says "it did not notice",
        "multi::one_that_is_lost_is_the_loss_of_all" says "the work goes on";
    RenewsAnyones "A renewal extends whatever lease is there." =>
        "ownership::a_foreign_renewal_changes_nothing" says "Held(",
        "ownership::a_late_release_spares_the_successor" says "Lost(LossReason::Taken)";
    TokenPerClient "The owner is the client, whatever token its claim has." =>
        "ownership::two_claims_of_one_client_are_two" says "both claims of one client were granted",
        "ownership::a_foreign_release_changes_nothing" says "NotHeld(Taken)";
    NotIdempotent "The same claim again is refused because the lock is held: by that very claim." =>
        "ownership::the_same_claim_is_one_lease" says "a free lock was refused";
    RepeatDoesNotExtend "The same claim again is granted, but the lease ends when it would have." =>
        "ownership::repeated_claims_extend_the_lease" says "on record";
    DepthAdds "The depth of nested holds is added to, so that a repeated request counts twice." =>
        "reentrancy::a_repeated_depth_counts_once" says "repeated depth";
    RenewalsReversed "A batch of renewals is answered in another order." =>
        "ownership::many_renewals_have_an_answer_each" says "number 0";
    RenewalsTooFew "A batch of renewals is answered only as far as the leases are still held." =>
        "ownership::many_renewals_have_an_answer_each" says "one answer for each renewal";
    LandsLate "An acquisition is sent by a task of its own that goes on when it is cancelled, behind the release." =>
        "cancellation::an_acquisition_polled_once_leaves_nothing" says "still held",
        "cancellation::an_abandoned_acquisition_leaves_nothing" says "still held";
    ErrorsAsBusy "That the store could not be asked is reported as Contended." =>
        "faults::a_killed_server_is_an_error" says "the server is down",
        "faults::a_late_reply_is_no_grant" says "the reply came after the ttl",
        "faults::a_lost_reply_is_asked_again" says "its own lease kept it out";
    ErrorsAsNo "That the store could not be asked is reported as Lost or NotHeld." =>
        "faults::a_killed_server_denies_nothing" says "while the server was down",
        "faults::a_held_lock_survives_a_restart_with_data" says "the store has no such lease any more";
    EffectDenied "An error claims that nothing has happened although the request was sent." =>
        "faults::a_lost_reply_leaves_nothing" says "unknown acquisition was left behind";
    NoBound "A call takes as long as the network takes." =>
        "faults::a_black_holed_connection_is_replaced" says "no bound of its own";
    NeverWakes "Waiters are not told of a release, although that is claimed." =>
        "waiting::a_release_wakes_a_waiter" says "slept through the release";
    WaitsForRelease "Waiters wait for a release, and not for the lapse of a lease that nobody will release." =>
        "waiting::an_expiry_wakes_a_waiter" says "slept through the expiry";
    BusyAnswers "A waiter is answered at once, and told to ask again at once." =>
        "waiting::waiting_costs_few_calls" says "times in 3 s";
    ShowsNobody "Nobody is shown as the holder of a lock." =>
        "waiting::a_holder_is_asked_to_yield" says "was not asked",
        "election::the_work_of_a_leader_ends_with_its_lease" says "a leader is not shown",
        "election::each_leader_of_a_process_is_seen" says "another is shown than the one that leads",
        "lifecycle::held_locks_are_listed_by_prefix" says "held names with the prefix",
        "lifecycle::a_renewal_may_change_the_name_that_is_shown" says "nobody holds it";
    LastComeFirst "Order is claimed, but the last to come goes first." =>
        "fairness::waiters_are_served_as_they_came" says "another order than they came",
        "fairness::a_try_does_not_overtake" says "a try overtook the waiter",
        "fairness::all_kinds_are_served_as_they_came" says "another order than they came",
        "fairness::permits_are_served_as_they_came" says "another order than they came";
    DeadWaitersStay "A waiter that died keeps its place in the queue for ever." =>
        "fairness::a_dead_waiter_is_skipped" says "still waits behind the dead",
        "fairness::a_place_that_nobody_asks_for_ends" says "still waits behind the dead";
    PlaceNotKept "A waiter in the queue keeps its place for a while only, however often it asks again." =>
        "fairness::a_waiter_that_asks_again_keeps_its_place" says "lost its place";
    CancelledStays "A waiter that gave up keeps its place in the queue until that ends by itself." =>
        "fairness::a_cancelled_waiter_leaves_the_line" says "still waits behind one that gave up",
        "fairness::a_waiter_that_gave_up_is_not_shown" says "is still shown to wait",
        "fairness::readers_go_on_when_a_writer_gives_up" says "still waits behind one that gave up";
    ShowsQueueBackwards "Those that wait are shown in another order than they came." =>
        "fairness::the_queue_is_shown_in_order" says "shown in another order than they came";
    HidesQueue "A queue is kept, but not shown." =>
        "lifecycle::a_queue_is_shown_where_there_is_one" says "its queue is not shown";
    ShowsWholeQueue "However long a queue is, all of it is shown." =>
        "fairness::a_long_queue_is_shown_in_part" says "are shown of";
    ReaderPassesWriter "A reader gets in beside other readers, although a writer waits." =>
        "fairness::a_waiting_writer_is_not_passed" says "a reader passed those that wait",
        "reentrancy::an_owner_that_reads_reads_again" says "another reader has passed a writer";
    TryBarges "A try takes what is free at that moment, whoever waits." =>
        "fairness::a_try_passes_no_waiting_writer" says "a reader's try passed a waiting writer",
        "fairness::a_try_takes_no_permit_from_those_that_wait" says "a try passed one that waits";
    GhostWaiters "A waiter that gave up is counted for ever." =>
        "cancellation::an_abandoned_waiter_leaves_no_trace" says "but nobody does";
    ReusesInDoubt "A connection that was left while an answer was still to come serves the next question." =>
        "abandoned::a_dropped_call_answers_no_other" says "dropped at poll";
    AnswersInOrder "The first answer that comes is taken for the one to the first question that waits, whatever it says." =>
        "behind::an_answer_that_comes_twice_shifts_no_others" says "Twice";
    NoFence "Fences are claimed, but every grant has the same." =>
        "fencing::never_decreases" says "0 came after 0",
        "election::the_next_leads_in_a_later_term" says "0 after 0",
        "fencing::a_stale_holder_is_refused_by_the_resource" says "the stale holder's write came through",
        "fencing::they_survive_a_restart_with_data" says "0 came after 0",
        "fencing::a_foreign_renewal_raises_nothing" says "0 after 0",
        "faults::a_frozen_holder_knows_when_it_wakes" says "the stale fence was admitted";
    FenceLapses "The fence counter expires with the lease and starts again." =>
        "fencing::never_decreases" says "by expiry";
    FenceRestarts "The fence counter is deleted with the lease when that is released or deleted." =>
        "fencing::never_decreases" says "1 came after 1",
        "fencing::they_survive_a_deletion" says "1 came after 1, by deletion",
        "election::the_next_leads_in_a_later_term" says "1 after 1",
        "election::a_frozen_leader_works_no_more" says "terms 1, 2, 1",
        "lifecycle::many_rounds_leave_nothing_behind" says "fence 1 came after 1";
    FenceLostWithData "The fence counter starts at 1 when the store's data is lost, although Hybrid is claimed." =>
        "fencing::they_survive_the_loss_of_all_data" says "1 came after 1",
        "faults::a_restart_without_data_is_noticed" says "1 came after 1";
    FloorIgnored "The floor that was asked for is not kept." =>
        "fencing::a_floor_is_kept" says "not above the floor";
    SpanIgnored "A grant says that it owns many fences, but the next one starts among them." =>
        "fencing::a_grant_owns_its_span" says "belongs to the grant before";
    FoldsCase "Names that differ in case are one lock." =>
        "input::odd_names_are_distinct" says "\"A\"";
    TrimsSpaces "Names that differ in trailing spaces are one lock." =>
        "input::odd_names_are_distinct" says "\"a \"",
        "records::they_are_no_locks" says "is another's";
    ReplacesAnyone "A grant in the place of a lease takes the place of whoever has the lock." =>
        "ownership::the_place_of_a_lease_is_taken_once" says "another's place was taken",
        "election::a_leader_may_hand_over" says "it was handed over twice",
        "lifecycle::a_lease_is_taken_up_by_its_token" says "taken up by another token";
    ReplacesNobody "A grant in the place of a lease takes a lock that nobody has." =>
        "ownership::the_place_of_a_lease_is_taken_once" says "nobody's place was taken",
        "lifecycle::a_lease_is_taken_up_by_its_token" says "taken up after its release";
    ReplacedIsFree "A grant in the place of a lease is answered, and the lock is free." =>
        "election::a_leader_may_hand_over" says "a leader is not seen",
        "window::a_lock_is_kept_for_its_window" says "granted twice",
        "window::dropping_a_guard_keeps_the_lock" says "one keeps the lock: []",
        "window::a_release_that_is_abandoned_keeps_the_lock" says "one keeps the lock: []",
        "window::a_holder_may_give_the_window_up" says "granted twice",
        "window::other_tasks_of_the_process_wait_as_well" says "handed over",
        "window::of_many_hosts_one_does_the_job" says "did the job";
    ReplacedLastsOn "A grant in the place of a lease ends no earlier than that lease would have." =>
        "window::what_is_left_of_the_lease_does_not_count" says "after the release";
    WindowOfALease "A lock that is kept when its holder is done is kept for no longer than the longest lease." =>
        "window::a_window_may_be_longer_than_any_lease" says "are left of",
        "window::what_is_late_does_not_cut_a_window_short" says "are left of";
    NobodyHoldsIt "A grant in the place of a lease that is gone is refused as if another had the lock." =>
        "window::a_lock_that_was_broken_is_not_kept" says "nobody has the lock";
    RecordsReadThenWritten "A record is read and, if it is what was seen, written in a second step." =>
        "records::each_change_builds_on_the_one_before" says "builds on",
        "records::a_store_has_one_identity" says "all know it by one";
    RecordsRemembered "A record that was read is not asked for again." =>
        "records::what_was_written_is_read" says "is read as";
    ClaimsShared "Shared locks are claimed, and are exclusive." =>
        "modes::readers_share_and_writers_exclude" says "readers must share",
        "fairness::readers_in_front_enter_together" says "one after the other",
        "reentrancy::an_owner_that_reads_can_not_write" says "a refused writer keeps readers out";
    DowngradesShared "Shared locks are not claimed, but granted when asked for: as exclusive ones." =>
        "modes::what_is_not_claimed_is_refused" says "the store has no shared locks";
    LooksForAnyMode "Shared locks are not claimed, but looked for when one is renewed or released." =>
        "modes::what_is_not_claimed_is_refused" says "a renewal with one beside it";
    DowngradeInTwoSteps "A writer becomes a reader by a release and a request as any other." =>
        "modes::a_writer_becomes_a_reader_without_a_gap" says "another got in between";
    DowngradeKeepsFence "A writer that becomes a reader keeps its fence." =>
        "modes::a_writer_becomes_a_reader_without_a_gap" says "not above the writer's",
        "modes::a_writer_that_became_a_reader_has_no_say" says "not above the writer's";
    DowngradeWakesNobody "Readers that wait are not told that a writer has become a reader." =>
        "modes::readers_follow_a_downgrade" says "waits beside a reader";
    LateDowngradeFrees "A downgrade of a writer whose lease is over frees the lock for those that wait." =>
        "modes::a_downgrade_that_comes_too_late_changes_nothing" says "the holder";
    ReplacesReaders "A grant in the place of a lease takes that of a reader, too." =>
        "modes::the_place_of_a_reader_is_not_taken" says "the place of a reader was taken";
    KindsApart "Exclusive locks, readers and permits of one name are kept in records of their own." =>
        "modes::readers_share_and_writers_exclude" says "a writer came in beside readers",
        "modes::a_plain_lock_excludes_readers" says "beside a plain lock",
        "modes::a_plain_lock_excludes_permits" says "beside a plain lock",
        "modes::readers_and_permits_exclude_each_other" says "beside a reader";
    ReadersShareALease "All readers have one lease, which ends when that of the last one that came would." =>
        "modes::a_dead_reader_lapses_alone" says "ended with another's";
    RenewsOtherReaders "A reader's renewal extends the leases of all readers." =>
        "modes::a_renewal_keeps_no_other_reader" says "is kept by another's renewals";
    WriterWaitsForTtl "A writer waits until the longest lease of a reader would have ended, although it was released." =>
        "modes::a_writer_waits_for_no_reader_that_left" says "is still waiting";
    ShowsOneHolder "Of several holders one is shown." =>
        "modes::all_readers_are_shown" says "are shown as",
        "modes::all_permits_are_shown" says "are shown as",
        "modes::a_released_reader_ends_no_other" says "are shown as";
    LimitOfFirst "The number of permits is that of whoever asked first, also when nobody has one any more." =>
        "modes::the_permit_count_changes_under_an_exclusive_lock" says "another number of permits";
    LimitOfLast "The number of permits is that of whoever asked last." =>
        "modes::a_differing_permit_count_is_refused" says "counts differ",
        "modes::those_that_wait_settle_the_permit_count" says "counts differ";
    PermitsWithoutOwners "Permits are counted up and down, whoever gives one back." =>
        "modes::a_double_release_adds_no_permit" says "given back twice";
    RepeatCountsTwice "A claim that asks again for what it holds is counted twice." =>
        "modes::the_same_claim_holds_one_permit" says "counts twice",
        "modes::the_same_claim_is_one_reader" says "counts twice";
    ReaderHasWritersFence "A reader carries the fence of the last writer." =>
        "modes::fences_order_readers_and_writers" says "not above the writer's",
        "modes::a_resource_refuses_a_writer_that_readers_came_after" says "the stale writer's write came through",
        "modes::a_resource_admits_all_that_share_the_lock" says "the writer before them came through";
    ReaderIgnoresFloor "A reader that joins others has their fence, whatever floor it asked for." =>
        "modes::a_reader_keeps_the_floor_it_asked_for" says "not above the floor";
    ReaderIgnoresRaise "A reader that joins others has their fence, whatever floor one of them was renewed with." =>
        "modes::a_reader_keeps_the_floor_of_a_renewal" says "is below the floor";
    ReadersFenceNotCounted "The fence of a reader that joins others counts for nothing with the next grant." =>
        "modes::a_reader_keeps_the_floor_it_asked_for" says "came after",
        "modes::a_resource_admits_all_that_share_the_lock" says "the next writer was refused";
}

impl Bug {
    /// The table for people, as it stands in `docs/testing.md`.
    #[must_use]
    pub fn table() -> String {
        let mut table = String::from("| bug | what is wrong | cases that must fail |\n|---|---|---|\n");
        for bug in Self::ALL {
            let cases: Vec<_> = bug.caught_by().iter().map(|catch| format!("`{}`", catch.case)).collect();
            table += &format!("| `{bug:?}` | {} | {} |\n", bug.what(), cases.join("<br>"));
        }
        table
    }
}
