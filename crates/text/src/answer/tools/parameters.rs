//! What a function takes, argument by argument: for formats that do not write arguments as one JSON object.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::Function;

/// Most schemas that a function's schema is put together from: references may lead to each other.
const MAX_SCHEMAS: usize = 64;
/// Deepest nesting of references and of schemas in schemas.
const MAX_DEPTH: usize = 16;
/// Most ways in which arguments may be put together.
const MAX_OBJECTS: usize = 16;

/// Keywords that say something about an object that its arguments one by one do not.
const OF_THE_WHOLE: [&str; 16] = [
    "$dynamicRef",
    "$recursiveRef",
    "const",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "if",
    "maxProperties",
    "minProperties",
    "not",
    "patternProperties",
    "propertyNames",
    "then",
    "unevaluatedProperties",
];

/// Keywords of values that are no text, or not text alone.
const OF_OTHERS: [&str; 21] = [
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "else",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "if",
    "items",
    "maxItems",
    "maximum",
    "minItems",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "prefixItems",
    "properties",
    "required",
    "then",
];

/// The schema of a function's arguments, taken apart.
#[derive(Debug)]
pub(super) struct Parameters<'a> {
    root: &'a Map<String, Value>,
    /// The arguments are one of these.
    pub(super) objects: Vec<Object<'a>>,
    /// Keywords with their places that say more than the objects do.
    pub(super) beyond: Vec<String>,
    /// Schemas that may still be read.
    left: usize,
}

/// One way to put arguments together.
#[derive(Clone, Debug, Default)]
pub(super) struct Object<'a> {
    /// In the order of the schema.
    pub(super) arguments: Vec<Argument<'a>>,
    places: HashMap<&'a str, usize>,
    required: Vec<&'a str>,
    pub(super) others: Others<'a>,
}

/// An argument that is named.
#[derive(Clone, Debug)]
pub(super) struct Argument<'a> {
    pub(super) name: &'a str,
    /// Schemas, all of which hold.
    pub(super) said: Vec<&'a Value>,
    pub(super) is_required: bool,
}

/// Arguments that are not named.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Others<'a> {
    /// Nothing is said: they are possible, and nobody waits for them.
    #[default]
    Unsaid,
    /// There are none.
    None,
    /// All of these hold for each.
    Of(Vec<&'a Value>),
}

impl<'a> Parameters<'a> {
    pub(super) fn of(root: &'a Map<String, Value>) -> Self {
        let mut parameters = Self {
            root,
            objects: Vec::new(),
            beyond: Vec::new(),
            left: MAX_SCHEMAS,
        };
        let mut objects = parameters.read_object(root, "", 0);
        for object in &mut objects {
            parameters.beyond.extend(object.complete());
        }
        parameters.objects = objects;
        parameters
    }

    /// Whether the value of an argument is written as it is, and is text whatever it looks like.
    pub(super) fn is_text(&self, name: &str) -> bool {
        let mut said = self.objects.iter().flat_map(|object| object.said(name));
        said.all(|schema| self.is_text_by(schema, 0))
    }

    /// [`Self::is_text`] of those that are not named.
    pub(super) fn others_are_text(&self) -> bool {
        let mut said = self.objects.iter().flat_map(|object| match &object.others {
            Others::Of(said) => said.as_slice(),
            Others::None | Others::Unsaid => &[],
        });
        said.all(|schema| self.is_text_by(schema, 0))
    }

    /// What is not described is text.
    fn is_text_by(&self, schema: &Value, depth: usize) -> bool {
        let Some(schema) = schema.as_object() else {
            return true;
        };
        if let (Some(target), true) = (self.target(schema), depth < MAX_DEPTH) {
            return self.is_text_by(target, depth + 1);
        }
        let is_string = |kind: &Value| kind == "string";
        match schema.get("type") {
            Some(Value::Array(kinds)) if kinds.iter().all(is_string) => return true,
            Some(Value::Array(kinds)) if kinds.iter().any(is_string) => {}
            Some(kind) => return is_string(kind),
            None => {}
        }
        match (schema.get("enum"), schema.get("const")) {
            (Some(Value::Array(values)), _) => !values.is_empty() && values.iter().all(Value::is_string),
            (_, Some(value)) => value.is_string(),
            _ => !schema.contains_key("type") && !OF_OTHERS.iter().any(|key| schema.contains_key(*key)),
        }
    }

    /// What a schema refers to that is a reference within the whole.
    pub(super) fn target(&self, schema: &Map<String, Value>) -> Option<&'a Value> {
        let mut path = schema.get("$ref")?.as_str()?.strip_prefix("#/")?.split('/');
        let name = |part: &str| part.replace("~1", "/").replace("~0", "~");
        let mut found = self.root.get(&name(path.next()?))?;
        for part in path {
            found = match found {
                Value::Object(fields) => fields.get(&name(part))?,
                Value::Array(items) => items.get(part.parse::<usize>().ok()?)?,
                _ => return None,
            };
        }
        Some(found)
    }

    fn read(&mut self, schema: &'a Value, place: &str, depth: usize) -> Vec<Object<'a>> {
        match schema {
            Value::Object(schema) if depth < MAX_DEPTH && self.left > 0 => {
                self.left -= 1;
                return self.read_object(schema, place, depth);
            }
            Value::Bool(true) => {}
            _ => self.beyond.push(format!("the schema at {place}")),
        }
        vec![Object::default()]
    }

    fn read_object(&mut self, schema: &'a Map<String, Value>, place: &str, depth: usize) -> Vec<Object<'a>> {
        let mut objects = vec![Object::own(schema)];
        for (key, value) in schema {
            let here = format!("{place}/{key}");
            // Each of these holds, in one of its ways.
            let more = match (key.as_str(), value) {
                ("$ref", _) => match self.target(schema) {
                    Some(target) => vec![self.read(target, &here, depth + 1)],
                    None => vec![Vec::new()],
                },
                ("allOf", Value::Array(all)) => self.read_each(all, &here, depth),
                ("anyOf", Value::Array(any)) => vec![self.read_each(any, &here, depth).concat()],
                ("oneOf", Value::Array(any)) => {
                    // That the others do not hold goes unsaid.
                    self.beyond.push(named(key, place));
                    vec![self.read_each(any, &here, depth).concat()]
                }
                ("type", Value::Array(kinds)) if kinds.iter().any(|kind| kind == "object") => continue,
                ("type", kind) if kind == "object" => continue,
                ("unevaluatedProperties", Value::Bool(false)) => continue,
                ("minProperties", least) if *least == 0 => continue,
                ("type", _) => vec![Vec::new()],
                (key, _) if OF_THE_WHOLE.contains(&key) => vec![Vec::new()],
                _ => continue,
            };
            for ways in more {
                if ways.is_empty() || objects.len() * ways.len() > MAX_OBJECTS {
                    self.beyond.push(named(key, place));
                } else {
                    let each = objects.iter();
                    objects = each.flat_map(|one| ways.iter().map(|way| one.and(way))).collect();
                }
            }
        }
        objects
    }

    fn read_each(&mut self, schemas: &'a [Value], place: &str, depth: usize) -> Vec<Vec<Object<'a>>> {
        let each = schemas.iter().enumerate();
        each.map(|(i, schema)| self.read(schema, &format!("{place}/{i}"), depth + 1))
            .collect()
    }
}

/// A keyword with the place of the schema that has it.
pub(super) fn named(keyword: &str, place: &str) -> String {
    match place {
        "" => format!("`{keyword}`"),
        place => format!("`{keyword}` at {place}"),
    }
}

impl<'a> Object<'a> {
    fn own(schema: &'a Map<String, Value>) -> Self {
        let properties = schema.get("properties").and_then(Value::as_object);
        let required = schema.get("required").and_then(Value::as_array);
        let mut object = Self {
            required: required.into_iter().flatten().filter_map(Value::as_str).collect(),
            others: match schema.get("additionalProperties") {
                None => Others::Unsaid,
                Some(Value::Bool(false)) => Others::None,
                Some(schema) => Others::Of(vec![schema]),
            },
            ..Self::default()
        };
        for (name, schema) in properties.into_iter().flatten() {
            object.push(name, vec![schema]);
        }
        object
    }

    fn push(&mut self, name: &'a str, said: Vec<&'a Value>) {
        self.places.insert(name, self.arguments.len());
        self.arguments.push(Argument {
            name,
            said,
            is_required: false,
        });
    }

    /// Both hold.
    fn and(&self, other: &Self) -> Self {
        let mut both = Self {
            required: [self.required.as_slice(), &other.required].concat(),
            others: match (&self.others, &other.others) {
                (Others::None, _) | (_, Others::None) => Others::None,
                (Others::Of(one), Others::Of(other)) => Others::Of([one.as_slice(), other].concat()),
                (Others::Unsaid, said) | (said, Others::Unsaid) => said.clone(),
            },
            ..Self::default()
        };
        for Argument { name, .. } in self.arguments.iter().chain(&other.arguments) {
            let known = both.places.contains_key(name);
            if !known && self.may_have(name) && other.may_have(name) {
                both.push(name, [self.said(name), other.said(name)].concat());
            }
        }
        both
    }

    /// All that is said about an argument.
    fn said(&self, name: &str) -> Vec<&'a Value> {
        match (self.places.get(name), &self.others) {
            (Some(&at), _) => self.arguments[at].said.clone(),
            (None, Others::Of(said)) => said.clone(),
            (None, Others::None | Others::Unsaid) => Vec::new(),
        }
    }

    fn may_have(&self, name: &str) -> bool {
        self.others != Others::None || self.places.contains_key(name)
    }

    /// Marks what is required, and adds it where it is not described; gives what is required and must not be there.
    fn complete(&mut self) -> Vec<String> {
        let mut impossible = Vec::new();
        for name in std::mem::take(&mut self.required) {
            if !self.may_have(name) {
                impossible.push(format!("`required` ({name} is not allowed)"));
                continue;
            }
            if !self.places.contains_key(name) {
                self.push(name, self.said(name));
            }
            self.arguments[self.places[name]].is_required = true;
        }
        impossible
    }
}

/// What a parser needs to know of a function's parameters.
#[derive(Debug, Default)]
pub(super) struct Signature {
    /// Arguments by name; true where the value is text.
    known: HashMap<String, bool>,
    /// All others.
    others_are_text: bool,
}

impl Signature {
    /// Of `name` among `functions`; of an unknown one all arguments are text.
    pub(super) fn of(name: &str, functions: &[Function]) -> Self {
        let empty = Map::new();
        let function = functions.iter().find(|function| function.name == name);
        let parameters = Parameters::of(function.map_or(&empty, |function| &function.parameters));
        let names = parameters.objects.iter().flat_map(|object| object.places.keys());
        let names: HashSet<&str> = names.copied().collect();
        Self {
            known: names
                .into_iter()
                .map(|name| (name.to_owned(), parameters.is_text(name)))
                .collect(),
            others_are_text: parameters.others_are_text(),
        }
    }

    pub(super) fn is_text(&self, name: &str) -> bool {
        self.known.get(name).copied().unwrap_or(self.others_are_text)
    }

    /// Whether some argument's name begins with `text` and goes on with `c`.
    pub(super) fn knows_beginning(&self, text: &str, c: char) -> bool {
        let mut names = self.known.keys();
        names.any(|name| name.strip_prefix(text).is_some_and(|rest| rest.starts_with(c)))
    }
}
