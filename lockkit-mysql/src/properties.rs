//! What must hold for every name and URL, tried with odd ones. `PROPTEST_CASES` says how many.

use lockkit_core::{ErrorKind, LockKey};
use proptest::prelude::*;

use crate::{MySqlConfig, wire::name};

/// Text of pieces that could confuse the spelling, and of anything else.
fn odd_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        3 => proptest::sample::select(vec!["a", "A", "á", " ", "%", "%41", "_", "`", "'", "\\", "/", "?", "#", "@", "\n", "\0"])
            .prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(piece, 1..8).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn names_come_back_and_stay_apart(a in odd_text(), b in odd_text(), bytes: Vec<u8>) {
        let [a, b] = [a, b].map(|text| LockKey::new(text).expect("not empty, and short"));
        prop_assert!(name::to_column(&a).len() <= LockKey::MAX_BYTES);
        prop_assert_eq!(name::from_column(name::to_column(&a)), Some(a.clone()));
        prop_assert_eq!(a == b, name::to_column(&a) == name::to_column(&b));
        if let Some(key) = name::from_column(&bytes) {
            prop_assert_eq!(name::to_column(&key), &bytes[..]);
        }
    }

    #[test]
    fn a_prefix_ends_behind_all_names_that_have_it(prefix in "\\PC{0,3}", name in odd_text(), rest in odd_text()) {
        let end = name::after_prefix(&prefix);
        for name in [format!("{prefix}{rest}"), name] {
            let between = prefix.as_bytes() <= name.as_bytes() && name.as_bytes() < end.as_slice();
            prop_assert_eq!(name.starts_with(&prefix), between, "{:?}", name);
        }
    }

    #[test]
    fn a_table_can_not_break_out(table in odd_text(), plain in "[a-zA-Z0-9_$]{1,64}") {
        prop_assert_eq!(name::quoted_table(&plain).expect("plain"), format!("`{plain}`"));
        if let Ok(quoted) = name::quoted_table(&table) {
            prop_assert!(!table.contains('`'));
            prop_assert_eq!(quoted, format!("`{table}`"));
        }
    }

    #[test]
    fn any_url_is_read_or_refused_in_one_line(
        user in "[a-z]{0,2}", rest in odd_text(), text: String,
        option in "[?&](table|timeout|connections|create|keep_rows|tls|ca|x)=[a-z0-9`]{0,4}",
    ) {
        const SECRET: &str = "Xs3cr3tX";
        for tail in ["h", "h:3306/db", "[::1]/", ""] {
            let url = format!("mysql://{user}:{SECRET}@{tail}{rest}{option}");
            let shown = match MySqlConfig::from_url(&url) {
                Ok(config) => format!("{config:?} {}", config.display_name()),
                Err(e) => {
                    // What there is no file for is well written.
                    prop_assert!(matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Misconfigured), "{e}");
                    prop_assert_eq!(e.to_string().lines().count(), 1, "{:?}", e.to_string());
                    format!("{e} {e:?}")
                }
            };
            prop_assert!(!shown.contains(SECRET), "{url:?}: {shown}");
        }
        for url in [text.clone(), format!("mysql:{text}"), format!("mysql://{text}"), format!("mysql://h/d?{text}")] {
            if let Err(e) = MySqlConfig::from_url(&url) {
                prop_assert_eq!(e.to_string().lines().count(), 1, "{:?}", e.to_string());
            }
        }
    }
}
