package agentlab

import "encoding/json"

// Options are the settings of a sandbox that only its backend has: a JSON
// object with sorted keys, or "" for no settings. Only the driver of the
// backend knows the names in it.
type Options string

// MarshalJSON implements json.Marshaler.
func (o Options) MarshalJSON() ([]byte, error) {
	if o == "" {
		return []byte("{}"), nil
	}
	return []byte(o), nil
}

// UnmarshalJSON implements json.Unmarshaler. Objects with the same settings
// become the same Options.
func (o *Options) UnmarshalJSON(data []byte) error {
	var settings map[string]json.RawMessage
	if err := json.Unmarshal(data, &settings); err != nil {
		return err
	}
	*o = ""
	if len(settings) == 0 {
		return nil
	}
	b, err := json.Marshal(settings)
	*o = Options(b)
	return err
}

// Decode stores the settings in v as json.Unmarshal does.
func (o Options) Decode(v any) error {
	if o == "" {
		return nil
	}
	return json.Unmarshal([]byte(o), v)
}
