//! The safeguards of the engine: how long a lease is believed in, and how it is kept.

use crate::list::safeguards;

const ENGINE: &str = "lockkit-core/src/engine/mod.rs";
const REAPER: &str = "lockkit-core/src/engine/reaper.rs";
const RELEASE: &str = "lockkit-core/src/engine/release.rs";
const LEASE: &str = "lockkit-core/src/engine/lease.rs";
const GUARD: &str = "lockkit-core/src/guard.rs";
const LANES: &str = "lockkit-core/src/engine/lanes.rs";
const RENEW: &str = "lockkit-core/src/engine/renew.rs";
const QUEUE: &str = "lockkit-core/src/engine/queue.rs";

safeguards! {
    // Locks that are kept.
    kept_in_background in REAPER
        "A release that is made again keeps the lock"
        "let mut pending = PendingRelease::new(self.claim.clone(), lapse, certainty, «self.kept»);" => "None"
        by "lockkit-core/keep::a_release_that_is_dropped_keeps_the_lock";
    nesting in RELEASE
        "A nested hold that is only asked for keeps no lease whose last other hold ends"
        "if «state.holds() > 1» {" => "state.depth > 1"
        by "lockkit-core/owners::a_nested_acquisition_that_is_not_polled_keeps_no_lease";
    kept_after_loss in RELEASE
        "So does the end of a lease that was lost"
        "(state.seat.take(), state.is_taken(), «Kept::of(&state)», state.deadline())" => "None"
        by "lockkit-core/keep::a_lock_that_is_lost_is_kept";
    kept_from_tasks in RELEASE
        "A lock that is to be kept is not handed over"
        "&& «state.kept_until().is_none()»" => "true"
        by "lockkit-core/keep::the_next_task_of_the_process_gets_no_lock_that_is_kept";
    // Believing in a lease.
    drift in ENGINE
        "Belief in a new lease ends before the lease can, by the drift of clocks"
        "hold.until = «hold.until - drift(hold.until.since(from).min(ttl))»;" => "hold.until"
        by "lockkit-testkit/late::belief_ends_before_the_lease_can";
    drift_renewed in RENEW
        "So does belief in a renewed one"
        "state.extend(«self.believed(hold, lease.terms.ttl, sent).until», now);" => "{ let _ = sent; hold.until }"
        by "lockkit-testkit/late::belief_ends_before_the_lease_can";
    drift_of_all in ENGINE
        "That is by the drift in all of its time, not in what is left of it when the answer comes"
        "let from = «if self.store.info().capability.liveness.ttl.is_some() { sent } else { self.now() }»;" => "{ let _ = sent; self.now() }"
        by "lockkit-testkit/late::belief_ends_as_much_before_the_lease_when_little_was_left_of_its_grant";
    late_renewal in LEASE
        "A renewal that is answered after the deadline changes nothing"
        "|| «now >= self.deadline()» {" => "false"
        by "lockkit-core/lib::engine::lease::tests::a_reply_after_the_deadline_comes_too_late";
    lost_is_final in LEASE
        "A lease that was lost stays lost, whatever a late answer says"
        "if «!self.is_live()» || !self.taken" => "false"
        by "lockkit-core/lib::engine::lease::tests::lost_is_final";
    untaken_extended in LEASE
        "A lease that nobody has taken yet is not extended by a late answer"
        "if !self.is_live() || «!self.taken»" => "false"
        by "lockkit-testkit/queue::a_lease_handed_to_nobody_lapses_through_alarms";
    untaken_scheduled in LEASE
        "A lease that nobody has taken yet is not renewed"
        "if !renew || «!self.taken» {" => "false"
        by "lockkit-testkit/queue::a_lease_handed_to_nobody_lapses";
    seat_after_loss in RELEASE
        "A holder that lost its lease lets the next in the local queue ask"
        "(«state.seat.take()», state.is_taken(), Kept" => "None::<Seat>"
        by "lockkit-core/life::a_lost_head_lets_the_next_one_ask";
    release_after_loss in RELEASE
        "A lease that was given up for lost is released, for a renewal may have come through"
        "«self.at_home(owed.work_off(self.now()))»;" => "drop(owed)"
        by "lockkit-testkit/queue::a_lease_handed_to_nobody_lapses";
    run_signal in GUARD
        "Guarded work is stopped before the lease can end"
        "if let Poll::Ready(reason) = «lost.as_mut().poll(cx)» {" => "Poll::<LossReason>::Pending"
        by "lockkit-testkit/late::work_is_stopped_before_its_lease_can_end";
    run_look in GUARD
        "Guarded work is not polled once more after its lease was lost"
        "if let Status::Lost(reason) = «self.status()» {\n                work = None;" => "Status::Held"
        by "lockkit-testkit/late::work_is_not_polled_once_more_after_a_pause";
    // Renewing.
    ttl_classes in LANES
        "Long leases do not take up the calls that short ones need"
        "ttl: «lease.ttl.as_millis().max(1).ilog2()»" => "0"
        by "lockkit-testkit/renewals::calls_for_long_leases_leave_room_for_short_ones";
    lane_of_doubt in LANES
        "Leases whose server is silent do not take up the calls that others need"
        "in_doubt: «!state.is_sure()»" => "false"
        by "lockkit-testkit/renewals::leases_in_doubt_are_asked_for_beside_the_others";
    few_renewals in LANES
        "Few renewals are under way at a time"
        "while «lane.under_way < AT_ONCE»" => "true"
        by "lockkit-testkit/renewals::an_alarm_for_all_loses_none";
    earliest_first in LANES
        "The earliest deadline is renewed first"
        "«self.waiting.pop_first()»" => "self.waiting.pop_last()"
        by "lockkit-testkit/renewals::after_a_long_pause_those_are_saved_that_can_be";
    short_sleep in RENEW
        "The timer looks up each second, for its sleep stands still while the machine is suspended"
        "Some(((at, _), _)) => «(*at).min(now + LONGEST_SLEEP)»," => "*at"
        by "lockkit-testkit/late::what_was_lost_while_the_machine_was_suspended_is_released_soon";
    renewal_bound in RENEW
        "A renewal without an answer is repeated before the lease ends"
        "timeout(«limit», &mut call).await" => "Duration::MAX"
        by "lockkit-testkit/late::a_renewal_without_an_answer_is_repeated_in_time";
    late_answer in RENEW
        "A renewal that is answered late, but in time for the lease, counts"
        "if let answer @ Ok(_) = «self.engine.heard(answer)» {" => "Err(late.clone())"
        by "lockkit-testkit/late::a_renewal_that_is_answered_late_counts";
    replaced_attempt in "lockkit-core/src/store/single_flight.rs"
        "A session that was made late, and that nothing keeps, is for nobody"
        "if «is_current» || outcome.is_err() {" => "true"
        by "lockkit-core/lib::store::single_flight::tests::what_a_replaced_attempt_makes_is_for_nobody";
    asking_doubt in "lockkit-core/src/lock/asking.rs"
        "A first claim that was not answered leaves in doubt that another has the lock"
        "answer = self.get_unasked(limit, «&mut doubts») => answer?," => "Box::leak(Box::<Doubts>::default())"
        by "lockkit-core/yielding::that_its_own_first_claim_was_in_the_way_is_no_answer";
    shutdown_left in "lockkit-core/src/engine/mod.rs"
        "A shutdown waits for a release whose runtime ends meanwhile"
        "if «!self.backlog.has_left()» && self.outstanding.count() == 0 {" => "true"
        by "lockkit-core/shutdown::a_release_whose_runtime_ends_meanwhile_is_waited_for";
    token_told in RELEASE
        "A lease whose token somebody was told is not handed over"
        "&& «!state.token_is_known»" => "true"
        by "lockkit-core/handed_over::a_token_that_was_told_is_that_of_no_later_holder";
    no_fence_handed_over in LEASE
        "Where there are no fences, none comes by handing over"
        "fence: if «self.fence == Fence::NONE» {" => "false"
        by "lockkit-core/handed_over::where_there_are_no_fences_none_comes_by_handing_over";
    handed_and_lapsed in QUEUE
        "A lease that lapsed on its way to the next holder keeps nobody out"
        "«if let Head::Holds(lease) | Head::IsHanded(lease, _) = &self.head { lease.upgrade() } else { None }»" =>
        "if let Head::Holds(lease) = &self.head { lease.upgrade() } else { None }"
        by "lockkit-core/handed_over::a_try_is_not_kept_out_by_a_lease_that_lapsed_on_its_way";
    awake in GUARD
        "Work is stopped in time also after the machine slept"
        "tokio::time::sleep(«left.min(awake)»)" => "left"
        by "lockkit-core/suspended::work_is_stopped_before_the_lease_can_lapse_also_after_a_sleep";
}
