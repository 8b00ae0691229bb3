//! How a body becomes a request: every field is read by a struct, known to be without effect, or an error that names it.

use plimsoll_core::untrusted::with_plain_types;
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};
use serde_json::{Map, Value};

use super::error::FieldError;
use super::fields::{Unsupported, check_values, is_listed};
use super::known::{Described, Unknown, UnknownFields};

/// The body of a request.
pub(crate) trait RequestBody: Described + Sized {
    /// Fields that are refused by name unless their value has no effect.
    const UNSUPPORTED: &[&[Unsupported]];
    /// Fields of the structs it consists of that this request does not have.
    const FOREIGN: &[&str] = &[];

    /// Removes its fields from `object`, with [`take`].
    fn take_from(object: &mut Map<String, Value>) -> Result<Self, FieldError>;
}

/// Parses a JSON body and checks the fields that its type does not have. `null` means absent. Also returns the unknown fields
/// that were ignored; an error names them.
pub(crate) fn parse<T: RequestBody>(body: &[u8], policy: UnknownFields) -> Result<(T, Unknown), FieldError> {
    let whole = |message: String| FieldError::Invalid { message, param: None };
    let text = std::str::from_utf8(body).map_err(|e| whole(format!("the body is not UTF-8: {e}")))?;
    let value: Value =
        serde_json::from_str(text).map_err(|e| whole(format!("the body is not valid JSON: {e}")))?;
    let Value::Object(mut object) = value else {
        return Err(whole("the body must be a JSON object".into()));
    };
    object.retain(|_, value| !value.is_null());
    let mut unknown = Unknown::default();
    for name in T::FOREIGN {
        if object.shift_remove(*name).is_some() {
            unknown.add(name, T::known().field_names());
        }
    }
    T::known().strip(&mut object, &mut unknown);
    let taken = T::take_from(&mut object);
    let own = || {
        T::known()
            .field_names()
            .filter(|name| !is_listed(name, T::UNSUPPORTED))
    };
    for name in object.keys().filter(|name| !is_listed(name, T::UNSUPPORTED)) {
        // After an error, fields that the type has are left over too.
        if taken.is_ok() || !T::known().has(name) {
            unknown.add(name, own());
        }
    }
    // First, as a field may be missing because its name is misspelled.
    if policy == UnknownFields::Error && !unknown.0.is_empty() {
        return Err(FieldError::Unknown(unknown.0));
    }
    let request = taken?;
    check_values(&object, T::UNSUPPORTED)?;
    Ok((request, unknown))
}

/// Moves the fields that `T` has from `object` into a `T`.
pub(crate) fn take<T: DeserializeOwned>(object: &mut Map<String, Value>) -> Result<T, FieldError> {
    let fields = field_names::<T>();
    let own = fields
        .iter()
        .filter_map(|&name| object.shift_remove(name).map(|value| (name.to_owned(), value)));
    serde_path_to_error::deserialize(Value::Object(own.collect())).map_err(|error| {
        let path = error.path().to_string();
        let inner = with_plain_types(&error.into_inner().to_string());
        if path != "." {
            return FieldError::invalid(path.clone(), format!("`{path}`: {inner}"));
        }
        FieldError::Invalid {
            param: missing(&inner).map(str::to_owned),
            message: inner,
        }
    })
}

/// Refuses two fields that stand for each other.
pub(crate) fn not_both(object: &Map<String, Value>, one: &str, other: &str) -> Result<(), FieldError> {
    match object.contains_key(one) && object.contains_key(other) {
        true => Err(FieldError::invalid(
            other,
            format!("`{one}` and `{other}` cannot both be set"),
        )),
        false => Ok(()),
    }
}

/// Parses a part of a request whose type depends on another field; `field` is its path. `null` means absent.
pub(crate) fn typed<T: DeserializeOwned>(mut value: Value, field: &str) -> Result<T, FieldError> {
    if let Value::Object(object) = &mut value {
        object.retain(|_, value| !value.is_null());
    }
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let inner = with_plain_types(&error.into_inner().to_string());
        let path = match (path.as_str(), missing(&inner)) {
            (".", None) => field.to_owned(),
            (".", Some(name)) => format!("{field}.{name}"),
            (path, _) => format!("{field}.{path}"),
        };
        FieldError::invalid(path.clone(), format!("`{path}`: {inner}"))
    })
}

/// The name of a missing field: serde gives it only in the message, the path is that of its parent.
fn missing(message: &str) -> Option<&str> {
    message.strip_prefix("missing field `")?.split('`').next()
}

/// The field names of a struct, as requested by its `Deserialize` implementation.
pub(crate) fn field_names<T: DeserializeOwned>() -> &'static [&'static str] {
    struct Ask<'a>(&'a mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Ask<'_> {
        type Error = serde::de::value::Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(Self::Error::custom("not a struct"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Self::Error> {
            *self.0 = fields;
            Err(Self::Error::custom("only the names are needed"))
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut fields: &'static [&'static str] = &[];
    let asked = T::deserialize(Ask(&mut fields));
    debug_assert!(
        asked.is_err() && !fields.is_empty(),
        "request types are structs without `flatten`"
    );
    fields
}
