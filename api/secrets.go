package api

// SecretVault tells to whom secrets bundles are encrypted.
type SecretVault struct {
	PublicKey  string   `json:"public_key" doc:"Of the daemon's own key"`
	Recipients []string `json:"recipients" doc:"Who else can open the bundles"`
	Bundles    []string `json:"bundles,omitempty" doc:"Bundles that were encrypted again"`
	Kept       []string `json:"kept,omitempty" doc:"Public keys of older keys that stay, because sops bundles need them"`
}

// SecretRotate asks for a new key.
type SecretRotate struct {
	Add    []string `json:"add,omitempty" doc:"Further recipients: age1…, ssh-ed25519 … or ssh-rsa …"`
	Remove []string `json:"remove,omitempty" doc:"Recipients who shall not open the bundles any more"`
}

// SecretCreate asks for an empty bundle.
type SecretCreate struct {
	Name string `json:"name"`
}

// SecretBundle is one secrets bundle in a list.
type SecretBundle struct {
	Name    string   `json:"name"`
	Format  string   `json:"format" enum:"age,sops" doc:"sops: kept and changed with the program sops"`
	Keys    []string `json:"keys" doc:"Names of the values, never the values"`
	Problem string   `json:"problem,omitempty" doc:"Why it cannot be read"`
}

// SecretShow asks for what a bundle holds.
type SecretShow struct {
	Reveal bool `json:"reveal,omitempty" doc:"With the values"`
}

// SecretEntry is one value of a bundle.
type SecretEntry struct {
	Key       string `json:"key"`
	Reference string `json:"reference,omitempty" doc:"Where the value is got from when it is delivered; empty for a literal"`
	Value     string `json:"value,omitempty" doc:"Of a literal, when it was asked for"`
}

// SecretText is the plain text of a bundle.
type SecretText struct {
	Text    string `json:"text" doc:"YAML"`
	Version string `json:"version" doc:"To be given back when it is replaced"`
}

// SecretValidate asks for a check of bundles.
type SecretValidate struct {
	Bundle  string `json:"bundle,omitempty" doc:"Empty: all"`
	Resolve bool   `json:"resolve,omitempty" doc:"Ask every reference for its value, and drop that"`
}

// SecretCheck tells what is wrong with bundles.
type SecretCheck struct {
	Checked  []string        `json:"checked" doc:"Bundles"`
	Findings []SecretFinding `json:"findings" doc:"Empty when all is well"`
}

// SecretFinding is one thing that is wrong.
type SecretFinding struct {
	Bundle  string `json:"bundle,omitempty" doc:"Empty: the folder or the key"`
	Key     string `json:"key,omitempty"`
	Problem string `json:"problem"`
	Hint    string `json:"hint,omitempty"`
}
