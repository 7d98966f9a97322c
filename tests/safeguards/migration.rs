//! The safeguards of a migration.

use crate::list::safeguards;

const DUAL: &str = "lockkit-core/src/migrate/dual.rs";
const ACQUIRE: &str = "lockkit-core/src/migrate/acquire.rs";
const RENEW: &str = "lockkit-core/src/migrate/renew.rs";
const CLAIM: &str = "lockkit-core/src/migrate/claim.rs";
const PAIR: &str = "lockkit-core/src/migrate/pair.rs";
const RECORD: &str = "lockkit-core/src/migrate/record.rs";
const RULES: &str = "lockkit-core/src/migrate/rules.rs";
const STEPS: &str = "lockkit-core/src/migrate/steps.rs";
const HOLDERS: &str = "lockkit-core/src/migrate/holders.rs";
const MIGRATION: &str = "lockkit-core/src/migrate/migration.rs";

safeguards! {
    moving_phase_at_grant in ACQUIRE
        "A grant stands only in the phase that it was asked for"
        "if «!now.stands(record.phase, Some(hold.fence))» {" => "hold.fence <= Fence::NONE"
        by "lockkit-core/dual::grants::a_grant_that_was_asked_for_in_the_phase_before_is_asked_for_anew";
    moving_phase_at_renewal in RENEW
        "So does a renewal"
        "if «!now.stands(phase, None)» {" => "false"
        by "lockkit-core/dual::renewals::a_renewal_does_not_stand_if_the_phase_has_gone_on_meanwhile";
    moving_shadow_unseen in DUAL
        "A store that has not shown the record is asked for no shadow of a lease"
        "if «!self.is_checked[Side::New.index()].load(Ordering::Acquire)» {" => "false"
        by "lockkit-core/shadow::a_store_that_has_not_shown_the_record_is_asked_for_no_lease";
    moving_floor_reached in STEPS
        "The next migration begins above what a clock that is ahead gave"
        "Ok((highest, _)) => Ok(«record.floor.max(Fence::new(highest))»)," => "record.floor.max(Fence::new(highest.min(0)))"
        by "lockkit-core/steps::ends::a_migration_goes_on_from_what_a_clock_that_is_ahead_gave";
    moving_shadow in RENEW
        "The shadow of a lease gives way to the lease itself"
        "«self.shadow.end_within(&renewal.claim, bound).await»;" => "()"
        by "lockkit-core/shadow::what_follows_a_lease_gives_way_to_the_lease_itself";
    moving_fresh in RULES
        "A reading of the phase is acted on for a short time only"
        "«now.since(sent) < fresh»" => "sent <= now || !fresh.is_zero()"
        by "lockkit-core/dual::grants::a_grant_does_not_stand_if_the_phase_has_gone_on_meanwhile";
    moving_belief_capped in RULES
        "No lease is believed in for longer than the drain counts on"
        "ends.into_iter().fold(now + «max_ttl», Moment::min)" => "max_ttl * 100"
        by "lockkit-core/dual::grants::a_lease_is_believed_in_for_no_longer_than_the_drain_counts_on";
    moving_carried in RULES
        "The new store is asked for no lower fence than the old one gave"
        "Fence::new(«first.get().saturating_sub(1)»)" => "first.get().min(1)"
        by "lockkit-core/dual::grants::fences_rise_through_every_phase";
    moving_raised in RULES
        "The old store's counter is raised to what the new one gave"
        "«second != first»" => "second < first"
        by "lockkit-core/dual::grants::fences_rise_through_every_phase";
    moving_floor_asked in STEPS
        "Every grant lies above the floor of the record"
        "next = record.next(goal, «highest»)?;" => "Fence::new(highest.get().min(0))"
        by "lockkit-core/dual::grants::fences_rise_through_every_phase";
    moving_never_waits_holding in ACQUIRE
        "A lock that the new store refuses is given back to the old one"
        "        «self.undo(entry).await?»;\n        if self.confirmed" => "()"
        by "lockkit-core/dual::grants::a_lock_that_the_new_store_refuses_is_given_back_to_the_old_one";
    moving_both_renewed in RULES
        "In both stores a lease is renewed in both"
        "held.uses(side) && «phase.uses(side)»" => "(phase.uses(side) && (side == Side::Old || phase == Phase::New))"
        by "lockkit-core/dual::renewals::a_lease_that_one_store_lost_is_lost";
    moving_burnt_at_a_store in CLAIM
        "A token whose release may have been sent to a store is not asked for there again"
        "if is_closed || part.is_asked || «part.left == Left::Released» {" => "false"
        by "lockkit-core/lib::migrate::claims::tests::a_token_whose_release_may_have_been_sent_is_not_asked_for_again";
    moving_other_way_round in RECORD
        "Clients that have the stores the other way round are refused"
        "if «is_at.is_some_and(|is_at| is_at != at)» {" => "false"
        by "lockkit-core/steps::phases::clients_of_other_stores_are_refused";
    moving_one_step in RECORD
        "No single step leads from the old store alone to the new one alone"
        "if «(self.phase == Phase::Both) == (goal == Phase::Both)» {" => "self.phase == goal"
        by "lockkit-core/steps::phases::only_a_step_back_goes_without_a_drain";
    moving_drain in STEPS
        "A step out of both stores waits until nobody acts on the phase before"
        "let left = «whole.saturating_sub(self.pair.now().since(start))»;" => "Duration::ZERO.min(whole.saturating_sub(self.pair.now().since(start)))"
        by "lockkit-core/steps::phases::only_a_step_back_goes_without_a_drain";
    moving_read_again in STEPS
        "After the drain both stores still have the record that it was for"
        "if «!self.is_settled(&record).await?» {\n                    continue;" => "false"
        by "lockkit-core/steps::fallen_back::a_store_that_fell_back_is_lifted_and_the_drain_begins_anew";
    moving_home_may_lose in RECORD
        "From a home that may lose what it confirmed no step back goes without a drain"
        "(goal == self.came_from && «home_is_durable»)" => "(home_is_durable || true)"
        by "lockkit-core/steps::phases::only_a_step_back_goes_without_a_drain";
    moving_lifted in PAIR
        "A change is made in the other store, too, before the drain begins"
        "match «keeper.compare_and_set(&name, found.as_ref(), Some(&text)).await?» {\n                Swap::Done => return Ok(())," =>
        "{ let _ = &text; Swap::Done }"
        by "lockkit-core/steps::ends::a_start_can_be_repeated_and_another_can_not_begin";
    moving_after_the_release in CLAIM
        "A grant of a store after the release was answered is released, too"
        "part.token == claim.token && part.left == Left::Released && «!part.is_asked»" => "true"
        by "lockkit-core/dual::renewals::a_lock_that_is_left_behind_while_it_is_asked_for_is_released_again";
    moving_end in RECORD
        "The end of a migration is newer than all that its commands may still write"
        "Ok(Self { is_over: true, is_shadowed: false, ..«self.renewed()?» })" => "self.clone()"
        by "lockkit-core/steps::ends::no_other_migration_begins_before_both_stores_know_of_the_end";
    moving_next in RULES
        "A migration is written over the end of the last one only if it began later"
        "true if «known.epoch < record.epoch» => Ok(true)," => "true"
        by "lockkit-core/steps::ends::a_start_that_stood_still_is_not_written_over_a_later_end";
    moving_right_store in PAIR
        "A store that has no record is no store of the migration, unless it is the one that it was started with"
        "if «known_identity(&**self.at(side)).await? == Some(record.stores[side.index()])» {" => "true"
        by "lockkit-core/steps::phases::a_step_between_other_stores_is_refused";
    moving_renewed_record in MIGRATION
        "Where a store lacks the record, a new one is written, so that a drain under way begins anew"
        "let renewed = «self.renewed(&record, &found)?»;" => "record.clone()"
        by "lockkit-core/steps::fallen_back::a_store_that_fell_back_is_noticed_though_another_migrator_has_lifted_it";
    moving_majority_of_nodes in PAIR
        "Of a quorum, a majority must have the record that a drain waits for"
        "_ if copies > «nodes / 2» && !is_ahead" => "0"
        by "lockkit-core/steps::quorum::a_quorum_of_which_a_node_fell_back_is_noticed";
    moving_unanswered in CLAIM
        "A claim without an answer from a store is released there before it is asked for again"
        "if «!self.is_answered» {" => "false"
        by "lockkit-core/lib::migrate::claims::tests::a_token_that_was_asked_for_without_an_answer_is_released_first";
    moving_others in HOLDERS
        "No step is taken while clients that know nothing of the migration hold locks"
        "if «self.despite_others» {" => "true"
        by "lockkit-core/steps::phases::others_who_hold_locks_stop_a_step_unless_told_otherwise";
    moving_fences_beyond in STEPS
        "A store is left to itself only once its fences are above all that there were"
        "_ if «self.fences_are_set» => {}" => "true"
        by "lockkit-core/steps::ends::a_store_is_left_to_itself_once_its_fences_are_above_all_others";
    moving_loss_is_no_release in RENEW
        "That a renewal finds a lease lost is no release of what the other store has of it"
        "Err(reason) => «return Ok(Renewed::Lost(reason))»," => "{ drop(self.release_in_phase(&one.renewal.claim).await); return Ok(Renewed::Lost(reason)) }"
        by "lockkit-core/dual::renewals::what_is_left_of_a_lost_lease_stays_until_its_release";
    moving_given_up in CLAIM
        "A place that one renewal gives up is not the lease that another got by it"
        "filter(|part| part.is_there() && «!is_held»)?" => "true"
        by "lockkit-core/lib::migrate::claims::tests::what_one_renewal_has_taken_along_another_does_not_leave";
    moving_once in CLAIM
        "A renewal that comes late leaves alone what another one took along"
        "state.over().is_some() || «state.held.is_some_and(|held| held.phase.uses(side))»" => "false"
        by "lockkit-core/dual::renewals::a_renewal_that_comes_late_leaves_alone_what_another_took_along";
    moving_next_waits in STEPS
        "The next migration begins when no client acts on what it read of the last one"
        "«self.pause(drain(Duration::ZERO, end.fresh), told).await»;" => "drop((drain(Duration::ZERO, end.fresh), told))"
        by "lockkit-core/steps::ends::the_next_migration_begins_when_no_client_acts_on_the_last_one_any_more";
    moving_withdrawn in MIGRATION
        "A start that finds another migration in the other store takes its record back"
        "drop(«self.withdraw(&wanted).await»);" => "Result::Ok(())"
        by "lockkit-core/steps::ends::two_starts_in_opposite_directions_are_in_the_way_of_no_later_one";
    moving_own_way in RENEW
        "A claim that arrives after its release is not in the way of the lock that goes along"
        "if let Some(unanswered) = «entry.unanswered_at(side)» {" => "entry.unanswered_at(side).filter(|_| false)"
        by "lockkit-core/dual::renewals::a_lock_that_goes_along_is_not_in_its_own_way";
    moving_late_answer in RENEW
        "A store's word on a former token is no loss"
        "if «entry.at(side) != claim» ||" => "false"
        by "lockkit-core/dual::renewals::a_late_answer_about_a_former_token_loses_nothing";
    moving_left_behind in CLAIM
        "A late renewal does not stand if another one has left a store behind meanwhile"
        "is_whole && «(now == since || now == Some(held.phase))»;" => "{ let _ = (now, since); true }"
        by "lockkit-core/dual::renewals::a_renewal_does_not_stand_while_another_one_takes_the_lease_along";
    part_released in CLAIM
        "A renewal does not stand that counts on a part which was released since"
        "state.over().is_none() && «is_whole» &&" => "true"
        by "lockkit-core/dual::renewals::a_grant_that_is_heard_after_its_release_is_asked_for_again";
    slow_reading in DUAL
        "A question for the record of a migration is led to its end, and there is one at a time"
        "«self.readings[side.index()].get(|_| false, bound, ask).await?»;" => "ask().await?"
        by "lockkit-core/dual::readings::a_slow_store_is_asked_once_at_a_time_and_may_answer";
}
