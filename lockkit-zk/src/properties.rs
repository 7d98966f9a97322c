//! What must hold for every name, value and URL, tried with odd ones. `PROPTEST_CASES` says how many.

use lockkit_core::{ErrorKind, Fence, HolderInfo, LockKey, Token};
use proptest::prelude::*;

use crate::{
    ZkConfig,
    wire::{
        name::{self, LOCK, Names},
        value::{self, Value},
    },
};

/// Text of pieces that could confuse the spelling, and of anything else.
fn odd_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        3 => proptest::sample::select(vec![
            "a", "A", "/", ".", "..", "%", "%2F", "%2f", "%session-", "zookeeper", "lockkit:", ":", "@", "?", "&", "\0",
            "\u{7f}", "\u{d7ff}", "\u{e000}", "\u{fff0}", "\u{10000}",
        ]).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(piece, 1..8).prop_map(|pieces| pieces.concat())
}

/// Whether `PathUtils.validatePath` of ZooKeeper 3.9 takes it as the name of one node.
fn is_node_name(node: &str) -> bool {
    let is_refused = |c: char| {
        matches!(c, '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..='\u{ffff}')
            || c == '/'
            || u32::from(c) > 0xffff
    };
    !matches!(node, "" | "." | ".." | "zookeeper") && !node.contains(is_refused)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn names_come_back_and_stay_apart(a in odd_text(), b in odd_text(), found in odd_text(), word in "[0-9a-f]{2}", id: i64) {
        let names = Names::new("/lockkit");
        let [a, b] = [a, b].map(|text| LockKey::new(text).expect("not empty, and short"));
        let path = names.lock(&a);
        let node = path.strip_prefix("/lockkit/").expect("in the root");
        prop_assert!(is_node_name(node), "{node:?}");
        prop_assert!(!Names::is_own(node));
        prop_assert_eq!(names.key(node), Some(a.clone()));
        prop_assert_eq!(a == b, path == names.lock(&b));
        prop_assert!(path != names.session(id) && path != names.trial(&word));
        if let Some(key) = names.key(&found) {
            prop_assert_eq!(names.lock(&key), format!("/lockkit/{found}"));
        }
    }

    #[test]
    fn the_longest_name_has_a_node(c in any::<char>()) {
        let longest = LockKey::new(c.to_string().repeat(LockKey::MAX_BYTES / c.len_utf8())).expect("fits");
        let names = Names::new("");
        let path = names.lock(&longest);
        prop_assert!(path.len() <= 3 * LockKey::MAX_BYTES + 1);
        prop_assert_eq!(names.key(&path[1..]), Some(longest));
    }

    #[test]
    fn a_claims_node_tells_its_token(token: u128, number: i32, other in odd_text()) {
        let token: Token = format!("{token:032x}").parse().expect("32 digits");
        let protection = name::protection(&token);
        prop_assert_eq!(name::token(&format!("{protection}{LOCK}{number:010}")), Some(token));
        for node in [&other, &format!("_c_{other}"), &format!("_c_{}{other}", token.reveal())] {
            prop_assert_eq!(name::token(node), None);
        }
    }

    #[test]
    fn a_value_survives_its_text(depth: u32, span: u32, fence: Option<u64>, holder in odd_text()) {
        let value = Value { depth, span, fence: fence.map(Fence::new), holder: HolderInfo::new(&holder) };
        prop_assert_eq!(Value::parse(value.text().as_bytes()), Some(value));
    }

    #[test]
    fn any_value_can_be_read(text in odd_text(), bytes: Vec<u8>) {
        for data in [bytes, text.clone().into_bytes(), format!("lockkit:1:{text}").into_bytes()] {
            prop_assert!(!value::holder(&data).as_str().contains(char::is_control));
        }
    }

    #[test]
    fn any_url_is_read_or_refused_in_one_line(
        tls: bool, rest in odd_text(), text: String, option in "&(base|session|timeout|auth|ca|cert|x)=[a-z0-9/]{0,4}",
    ) {
        const SECRET: &str = "Xs3cr3tX";
        let scheme = if tls { "zks" } else { "zk" };
        let before = [format!("h{}", rest.replace(['?', '@'], "")), "h,[::1]:1/a".to_owned(), String::new()];
        for hosts in before {
            let url = format!("{scheme}://{hosts}?auth=digest:me:{SECRET}{rest}{option}");
            let shown = match ZkConfig::from_url(&url) {
                Ok(config) => format!("{config:?} {}", config.display_name()),
                Err(e) => {
                    prop_assert_eq!(e.kind(), ErrorKind::InvalidInput);
                    prop_assert_eq!(e.to_string().lines().count(), 1, "{:?}", e.to_string());
                    format!("{e} {e:?}")
                }
            };
            prop_assert!(!shown.contains(SECRET), "{url:?}: {shown}");
        }
        for url in [text.clone(), format!("zk://{text}"), format!("zks://{text}"), format!("zk://h?{text}")] {
            if let Err(e) = ZkConfig::from_url(&url) {
                prop_assert_eq!(e.to_string().lines().count(), 1, "{:?}", e.to_string());
            }
        }
    }
}
